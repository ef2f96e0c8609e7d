//! The modules of a GPU. Requested modules are compiled concurrently, and a module is loaded when one of its kernels is
//! needed.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use corella_model::DeviceError;
use cudarc::driver::sys;

use super::super::compiler::{Compilation, Compiler};
use super::super::cubin_cache::CubinCache;
use super::super::loaded_kernels::LoadedKernels;
use super::super::nvrtc::Nvrtc;
use super::super::{Kernel, ModuleSource, cubin};
use super::calls::check;

#[derive(Debug)]
pub struct Modules {
    nvrtc: Nvrtc,
    /// The GPU's architecture, such as `sm_90a`.
    architecture: Arc<str>,
    driver_version: i32,
    /// The most shared memory of a block, in bytes.
    max_shared_bytes: usize,
    cache: Arc<CubinCache>,
    compiler: Arc<Compiler>,
    asked_for: LoadedKernels,
    /// The kernels, by the index in `Kernel`. No kernel is added while steps run, so that reading never waits.
    kernels: RwLock<Vec<KernelEntry>>,
}

/// A requested kernel.
#[derive(Debug)]
pub struct KernelEntry {
    name: String,
    module: Arc<Module>,
    loaded: OnceLock<Result<LoadedKernel, DeviceError>>,
}

#[derive(Clone, Copy, Debug)]
pub struct LoadedKernel {
    pub function: sys::CUfunction,
    pub args_bytes: usize,
    pub max_threads: u32,
}

/// The result of a compilation: a cubin.
type Compiled = Result<Vec<u8>, DeviceError>;

/// A requested module, whether it is compiled and loaded yet or not.
#[derive(Debug)]
struct Module {
    source_name: &'static str,
    /// The module's code, until the module is loaded.
    compilation: Mutex<Option<Compilation<Compiled>>>,
    loaded: OnceLock<Result<LoadedModule, DeviceError>>,
}

#[derive(Debug)]
struct LoadedModule {
    handle: sys::CUmodule,
    cubin: Vec<u8>,
}

// SAFETY: handles of the driver may be used by any thread in which the context is current.
unsafe impl Send for LoadedModule {}
// SAFETY: as above; the module does not change.
unsafe impl Sync for LoadedModule {}
// SAFETY: as for modules.
unsafe impl Send for LoadedKernel {}
// SAFETY: as for modules.
unsafe impl Sync for LoadedKernel {}

impl Modules {
    pub fn new(
        nvrtc: Nvrtc,
        architecture: &str,
        driver_version: i32,
        max_shared_bytes: usize,
    ) -> Self {
        let num_cores = std::thread::available_parallelism().map_or(1, |number| number.get());
        Self {
            nvrtc,
            architecture: architecture.into(),
            driver_version,
            max_shared_bytes,
            cache: Arc::new(CubinCache::of_user()),
            compiler: Compiler::new(num_cores),
            asked_for: LoadedKernels::default(),
            kernels: RwLock::default(),
        }
    }

    /// Begins to compile a source, or to read its cached code, unless an earlier call has begun.
    pub fn ask_for(
        &self,
        source: &ModuleSource,
        names: &[&str],
    ) -> Result<Vec<Kernel>, DeviceError> {
        self.asked_for.get_or_load(source, names, || {
            let (nvrtc, architecture) = (self.nvrtc, Arc::clone(&self.architecture));
            let (cache, compiled) = (Arc::clone(&self.cache), source.clone());
            let compile = move || {
                let key = nvrtc.key(&compiled, &architecture);
                if let Some(cubin) = cache.get(key) {
                    return Ok(cubin);
                }
                let compiled = nvrtc.compile(&compiled, &architecture, false)?;
                cache.put(key, &compiled.cubin);
                Ok(compiled.cubin)
            };
            let compilation = self.compiler.start(compile);
            let compilation = compilation
                .map_err(|error| DeviceError(format!("no thread compiles kernels: {error}")))?;
            let module = Arc::new(Module {
                source_name: source.name,
                compilation: Mutex::new(Some(compilation)),
                loaded: OnceLock::new(),
            });
            let entry = |name: &&str| KernelEntry {
                name: (*name).into(),
                module: Arc::clone(&module),
                loaded: OnceLock::new(),
            };
            let mut kernels = self.kernels.write().unwrap();
            let first = kernels.len() as u64;
            kernels.extend(names.iter().map(entry));
            Ok((first..kernels.len() as u64).map(Kernel).collect())
        })
    }

    pub fn kernels(&self) -> RwLockReadGuard<'_, Vec<KernelEntry>> {
        self.kernels.read().unwrap()
    }

    /// Loads all requested modules. The context is current.
    pub fn finish(&self) -> Result<(), DeviceError> {
        let kernels = self.kernels();
        kernels
            .iter()
            .try_for_each(|kernel| kernel.loaded(self).map(|_| ()))
    }

    /// Unloads all modules. The context is current, and no kernel runs.
    pub fn unload(&mut self) {
        let kernels = self
            .kernels
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for kernel in kernels.drain(..) {
            // A module is unloaded with the last of its kernels.
            if let Some(module) = Arc::into_inner(kernel.module)
                && let Some(Ok(loaded)) = module.loaded.into_inner()
            {
                // SAFETY: the module is loaded, and this is its last reference.
                let _ = unsafe { sys::cuModuleUnload(loaded.handle) };
            }
        }
    }

    /// Adds to an error of the driver that it may not support the code of a newer NVRTC.
    fn explain_age(&self, error: DeviceError) -> DeviceError {
        let (toolkit, driver) = (self.nvrtc.major_version(), self.driver_version / 1000);
        match toolkit > driver {
            true => DeviceError(format!(
                "{}; it was compiled by NVRTC {}, but the driver is of CUDA {driver}: update the driver, or install \
                 an NVRTC of its version",
                error.0,
                self.nvrtc.version()
            )),
            false => error,
        }
    }
}

impl KernelEntry {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel. Its module is loaded if necessary. The context is current.
    pub fn loaded(&self, modules: &Modules) -> Result<LoadedKernel, DeviceError> {
        let loaded = self.loaded.get_or_init(|| {
            let module = self.module.loaded(modules)?;
            self.load(module, modules.max_shared_bytes)
        });
        loaded.clone()
    }

    fn load(
        &self,
        module: &LoadedModule,
        max_shared_bytes: usize,
    ) -> Result<LoadedKernel, DeviceError> {
        let (name, source_name) = (&self.name, self.module.source_name);
        let symbol = CString::new(name.as_str()).expect("a kernel's name has no NUL");
        let mut function = null_mut();
        let (mut static_bytes, mut max_threads) = (0, 0);
        use sys::CUfunction_attribute::*;
        // SAFETY: the module is loaded, the name is a C string, and the attributes are integers.
        unsafe {
            let result = sys::cuModuleGetFunction(&mut function, module.handle, symbol.as_ptr());
            check(result, &format!("find kernel {name} of {source_name}"))?;
            let attribute = CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let result = sys::cuFuncGetAttribute(&mut static_bytes, attribute, function);
            check(result, "tell how much shared memory a kernel has")?;
            let attribute = CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
            let result = sys::cuFuncGetAttribute(&mut max_threads, attribute, function);
            check(result, "tell how many threads a kernel has")?;
            let dynamic_bytes = max_shared_bytes as i32 - static_bytes;
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let result = sys::cuFuncSetAttribute(function, attribute, dynamic_bytes);
            check(result, "give a kernel its shared memory")?;
        }
        let args_bytes = cubin::variable(&module.cubin, &format!("{name}_args_bytes"));
        let args_bytes = args_bytes.ok_or_else(|| {
            DeviceError(format!(
                "{source_name} does not define {name} by KERNEL or KERNEL_OF"
            ))
        })?;
        Ok(LoadedKernel {
            function,
            args_bytes: args_bytes as usize,
            max_threads: max_threads as u32,
        })
    }
}

impl Module {
    fn loaded(&self, modules: &Modules) -> Result<&LoadedModule, DeviceError> {
        let loaded = self.loaded.get_or_init(|| {
            let compilation = self
                .compilation
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let cubin = compilation.and_then(Compilation::wait);
            let lost = || DeviceError(format!("the compiler of {} has ended", self.source_name));
            let cubin = cubin.ok_or_else(lost)??;
            let mut handle = null_mut();
            // SAFETY: a cubin contains its length.
            let result = unsafe { sys::cuModuleLoadData(&mut handle, cubin.as_ptr().cast()) };
            check(result, &format!("load the kernels of {}", self.source_name))
                .map_err(|error| modules.explain_age(error))?;
            Ok(LoadedModule { handle, cubin })
        });
        loaded.as_ref().map_err(DeviceError::clone)
    }
}
