//! A shared object of kernels, and the launch of one of them.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use corella_model::DeviceError;

use super::fault;
use super::host_compiler::{failed, unique_path};
use crate::device::Grid;

const MAX_THREADS: usize = 1024;
const STACK_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
/// More dynamic shared memory than any device has.
const SHARED_BYTES: usize = 256 << 10;

/// One copy of a shared object, with static shared memory of its own.
#[derive(Debug)]
pub struct Library {
    name: &'static str,
    handle: *mut c_void,
    run: unsafe extern "C" fn(*mut EmulatedLaunch) -> bool,
    /// Held during a launch, because the object has the state of a single launch.
    running: Mutex<()>,
}

// SAFETY: the object's state is used under `running`.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The layout of `EmulatedLaunch` in `emulation.h`.
#[repr(C)]
pub struct EmulatedLaunch {
    kernel: unsafe extern "C" fn(*const c_void),
    name: *const c_char,
    args: *const c_void,
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    shared: *mut u8,
    stacks: *mut u8,
    stack_stride: usize,
    /// The block and the thread that run now.
    now: [u32; 4],
    error: [c_char; 512],
}

impl EmulatedLaunch {
    pub fn name(&self) -> &CStr {
        // SAFETY: the name is a C string of the running kernel.
        unsafe { CStr::from_ptr(self.name) }
    }

    pub fn now(&self) -> [u32; 4] {
        self.now
    }
}

impl Library {
    /// Loads a copy of the file, because for the same file the loader would return the same object again.
    pub fn open(name: &'static str, object: &Path) -> Result<Self, DeviceError> {
        let folder = object.parent().expect("the file is in a folder");
        let copy = unique_path(folder).with_extension("copy");
        fs::copy(object, &copy).map_err(|error| failed(&copy, &error))?;
        let path = CString::new(copy.as_os_str().as_encoded_bytes()).expect("a path has no NUL");
        // SAFETY: the object runs no code when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let _ = fs::remove_file(&copy);
        if handle.is_null() {
            // SAFETY: the error is a C string until the next call of the loader in this thread.
            let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
            let reason = reason.to_string_lossy();
            return Err(DeviceError(format!("{name} cannot be loaded: {reason}")));
        }
        let run = find(handle, "emulation_run").expect("emulation.h defines this");
        Ok(Self {
            name,
            handle,
            // SAFETY: emulation.h defines the function with this type.
            run: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut EmulatedLaunch) -> bool>(
                    run,
                )
            },
            running: Mutex::default(),
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the object is no longer used.
        unsafe { libc::dlclose(self.handle) };
    }
}

fn find(handle: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: the object is loaded, and the name is a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// A kernel.
#[derive(Debug)]
pub struct Function {
    library: Arc<Library>,
    name: CString,
    kernel: unsafe extern "C" fn(*const c_void),
    args_bytes: usize,
    max_threads: u32,
}

impl Function {
    pub fn find(library: &Arc<Library>, name: &str) -> Result<Self, DeviceError> {
        let symbol = |name: String| {
            find(library.handle, &name)
                .ok_or_else(|| DeviceError(format!("{} has no kernel {name}", library.name)))
        };
        // SAFETY: KERNEL_OF defines these symbols with these types.
        unsafe {
            Ok(Self {
                library: Arc::clone(library),
                kernel: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void)>(
                    symbol(name.into())?,
                ),
                args_bytes: *symbol(format!("{name}_args_bytes"))?.cast::<u32>() as usize,
                max_threads: *symbol(format!("{name}_max_threads"))?.cast::<u32>(),
                name: CString::new(name).expect("a symbol has no NUL"),
            })
        }
    }

    /// Whether a device would accept the launch.
    pub fn check(
        &self,
        grid: Grid,
        args_bytes: usize,
        max_shared_bytes: usize,
    ) -> Result<(), DeviceError> {
        let Grid {
            blocks,
            threads,
            shared_bytes,
        } = grid;
        let reason = if args_bytes != self.args_bytes {
            format!(
                "its parameters have {} bytes, not {args_bytes}",
                self.args_bytes
            )
        } else if threads == 0 || !threads.is_multiple_of(32) || threads > self.max_threads {
            format!(
                "a block of {threads} threads: they must be a multiple of 32 and at most {}",
                self.max_threads
            )
        } else if blocks.contains(&0) || blocks[1] > 65535 || blocks[2] > 65535 {
            format!("a grid of {blocks:?} blocks: none may be 0, and y and z are at most 65535")
        } else if shared_bytes as usize > max_shared_bytes {
            format!("{shared_bytes} bytes of dynamic shared memory: there are {max_shared_bytes}")
        } else {
            return Ok(());
        };
        let name = self.name.to_string_lossy();
        Err(DeviceError(format!(
            "kernel {name} was launched wrongly: {reason}"
        )))
    }

    /// # Safety
    /// `check` was passed, the bytes are of the kernel's parameter type, and the memory that the kernel accesses is not
    /// changed meanwhile.
    pub unsafe fn run(&self, grid: Grid, args: &[u8]) -> Result<(), DeviceError> {
        // Parameters may have to be aligned to 16 bytes.
        let mut aligned = vec![0_u128; args.len().div_ceil(16)];
        // SAFETY: the buffer has room for them.
        unsafe {
            aligned
                .as_mut_ptr()
                .cast::<u8>()
                .copy_from(args.as_ptr(), args.len());
        }
        let stacks = Stacks::take()?;
        let mut launch = EmulatedLaunch {
            kernel: self.kernel,
            name: self.name.as_ptr(),
            args: aligned.as_ptr().cast(),
            blocks: grid.blocks,
            threads: grid.threads,
            shared_bytes: grid.shared_bytes,
            shared: stacks.shared_memory(grid.shared_bytes as usize),
            stacks: stacks.mapping,
            stack_stride: Stacks::STRIDE,
            now: [0; 4],
            error: [0; 512],
        };
        let running = self.library.running.lock().unwrap();
        let went_well = fault::watch(&mut launch, |launch| {
            // SAFETY: the caller's promise; the stacks and the shared memory belong to this launch.
            unsafe { (self.library.run)(launch) }
        });
        drop(running);
        stacks.give_back();
        if went_well {
            return Ok(());
        }
        // SAFETY: the object wrote a C string.
        let error = unsafe { CStr::from_ptr(launch.error.as_ptr()) };
        Err(DeviceError(error.to_string_lossy().into_owned()))
    }
}

/// The stacks of a block's threads and its dynamic shared memory, with inaccessible pages around each.
struct Stacks {
    mapping: *mut u8,
}

// SAFETY: the mapping belongs to this value.
unsafe impl Send for Stacks {}

/// Unused stacks. The highest number of concurrent launches limits their number.
static IDLE_STACKS: Mutex<Vec<Stacks>> = Mutex::new(Vec::new());

impl Stacks {
    const STRIDE: usize = STACK_BYTES + PAGE_BYTES;

    fn take() -> Result<Self, DeviceError> {
        if let Some(stacks) = IDLE_STACKS.lock().unwrap().pop() {
            return Ok(stacks);
        }
        // Each stack grows down to a guard page of its own. One more guard page lies on each side of the shared memory.
        let mapped_bytes = MAX_THREADS * Self::STRIDE + SHARED_BYTES + 2 * PAGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let open = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, whose pages are opened within it.
        unsafe {
            let mapping = libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            let mut failed = mapping == libc::MAP_FAILED;
            for thread in 0..MAX_THREADS {
                let stack = mapping.byte_add(thread * Self::STRIDE + PAGE_BYTES);
                failed = failed || libc::mprotect(stack, STACK_BYTES, open) != 0;
            }
            let shared = mapping.byte_add(MAX_THREADS * Self::STRIDE + PAGE_BYTES);
            failed = failed || libc::mprotect(shared, SHARED_BYTES, open) != 0;
            if failed {
                let error = std::io::Error::last_os_error();
                return Err(DeviceError(format!(
                    "stacks of threads cannot be mapped: {error}"
                )));
            }
            Ok(Self {
                mapping: mapping.cast(),
            })
        }
    }

    /// A block's dynamic shared memory. It ends at an inaccessible page, up to alignment, so that an access beyond it
    /// is found.
    fn shared_memory(&self, num_bytes: usize) -> *mut u8 {
        let end = MAX_THREADS * Self::STRIDE + PAGE_BYTES + SHARED_BYTES;
        self.mapping
            .wrapping_add(end - num_bytes.next_multiple_of(128))
    }

    fn give_back(self) {
        IDLE_STACKS.lock().unwrap().push(self);
    }
}
