//! A GPU, through NVIDIA's driver, which is loaded when the GPU is opened.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, LockResult, Mutex, OnceLock, PoisonError, RwLock};

use corella_model::DeviceError;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUlaunchAttributeID as Id};

use super::nvrtc::Nvrtc;
use super::{
    Device, DevicePointer, DeviceProperties, Event, Graph, Grid, Kernel, ModuleSource, Product,
    SharedDevice, Stream, Tensor, TensorMap,
};

mod calls;
mod modules;
mod products;
mod tensor_maps;
mod wgmma;

use calls::check;
use modules::Modules;
use products::{Products, WORKSPACE_BYTES};

/// The oldest supported generation.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

#[derive(Debug)]
pub struct GpuDevice {
    properties: DeviceProperties,
    device: sys::CUdevice,
    context: sys::CUcontext,
    compute: sys::CUstream,
    pages: sys::CUstream,
    /// Zeroes new memory concurrently with other work and captures.
    setup: sys::CUstream,
    workspace: DevicePointer,
    /// Whether blocks of a kernel may start while the previous kernel still runs.
    overlaps_kernels: bool,
    /// The vendor's library for products. It is large, and most executors do not need it, so it is loaded at its first
    /// use.
    products: OnceLock<Result<Products, DeviceError>>,
    modules: Modules,
    graphs: RwLock<Vec<sys::CUgraphExec>>,
    events: Mutex<EventPool>,
}

// SAFETY: handles of the driver may be used by any thread in which the context is current.
unsafe impl Send for GpuDevice {}
// SAFETY: as above; mutable state lies behind locks.
unsafe impl Sync for GpuDevice {}

/// Events by the index in `Event`, and the indices of unused events.
#[derive(Debug, Default)]
struct EventPool {
    events: Vec<sys::CUevent>,
    idle: Vec<usize>,
}

impl GpuDevice {
    /// Opens the GPU with this index, in the driver's order.
    pub fn open(ordinal: usize) -> Result<SharedDevice, DeviceError> {
        let driver_version = calls::load()?;
        let nvrtc = Nvrtc::open()?;
        let device = find_device(ordinal)?;
        let properties = properties(device, &nvrtc)?;
        let architecture = &properties.architecture;
        let max_shared_bytes = properties.max_shared_bytes;
        // From here on, dropping `opened` closes the device.
        let mut opened = Self {
            modules: Modules::new(nvrtc, architecture, driver_version, max_shared_bytes),
            properties,
            device,
            context: retain_context(device)?,
            compute: null_mut(),
            pages: null_mut(),
            setup: null_mut(),
            workspace: DevicePointer::NULL,
            overlaps_kernels: can_overlap_kernels(device, driver_version)?,
            products: OnceLock::new(),
            graphs: RwLock::default(),
            events: Mutex::default(),
        };
        opened.bind()?;
        for stream in [&mut opened.compute, &mut opened.pages, &mut opened.setup] {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current.
            let result = unsafe { sys::cuStreamCreate(stream, flags) };
            check(result, "make a stream")?;
        }
        opened.workspace = opened.allocate(WORKSPACE_BYTES)?;
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: the context is current.
        let result = unsafe { sys::cuMemGetInfo_v2(&mut free_bytes, &mut total_bytes) };
        check(result, "tell how much memory it has")?;
        opened.properties.free_bytes = free_bytes;
        opened.properties.total_bytes = total_bytes;
        Ok(Arc::new(opened))
    }

    /// Makes the context current in the calling thread.
    fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context exists as long as this value.
        let result = unsafe { sys::cuCtxSetCurrent(self.context) };
        check(result, "be used by a thread")
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Compute => self.compute,
            Stream::Pages => self.pages,
        }
    }

    /// # Safety
    /// As for `Device::launch`.
    unsafe fn launch_kernel(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        cluster_blocks: Option<u32>,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        self.bind()?;
        let kernels = self.modules.kernels();
        let entry = (kernels.get(kernel.0 as usize))
            .ok_or_else(|| DeviceError(format!("no kernel has number {}", kernel.0)))?;
        let kernel = entry.loaded(&self.modules)?;
        if args.len() != kernel.args_bytes || grid.threads > kernel.max_threads {
            return Err(DeviceError(format!(
                "kernel {} takes {} bytes of parameters and at most {} threads a block, not {} and {}",
                entry.name(),
                kernel.args_bytes,
                kernel.max_threads,
                args.len(),
                grid.threads
            )));
        }
        let [x, y, z] = grid.blocks;
        let mut parameters = [args.as_ptr().cast_mut().cast::<c_void>()];
        let mut attributes = [
            launch_attribute(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: 1,
                },
            ),
            launch_attribute(
                Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue {
                    clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                        x: cluster_blocks.unwrap_or(1),
                        y: 1,
                        z: 1,
                    },
                },
            ),
        ];
        let first = usize::from(!self.overlaps_kernels);
        let attributes = &mut attributes[first..1 + usize::from(cluster_blocks.is_some())];
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: self.stream(stream),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let function = kernel.function;
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the only parameter has as many bytes as the kernel takes, which the driver copies, and the caller
        // vouches for their meaning. Every kernel waits for its predecessor (prelude.cuh).
        let result = unsafe { sys::cuLaunchKernelEx(&config, function, parameters, null_mut()) };
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            _ => check(
                result,
                &format!("launch kernel {} with {grid:?}", entry.name()),
            ),
        }
    }

    fn event(&self, event: Event) -> Result<sys::CUevent, DeviceError> {
        let events = self.events.lock().unwrap();
        let found = events.events.get(event.0 as usize).copied();
        found.ok_or_else(|| DeviceError(format!("no event has number {}", event.0)))
    }
}

/// The first GPU with its total memory, without opening it; `None` on a machine without one.
///
/// # Errors
/// A GPU exists, but its driver, NVRTC or generation is not usable.
pub fn find_gpu() -> Result<Option<DeviceProperties>, DeviceError> {
    if !calls::finds_gpu() {
        return Ok(None);
    }
    calls::load()?;
    let device = find_device(0)?;
    let mut properties = properties(device, &Nvrtc::open()?)?;
    // SAFETY: the device exists, and the function writes a number of bytes.
    let result = unsafe { sys::cuDeviceTotalMem_v2(&mut properties.total_bytes, device) };
    check(result, "tell how much memory it has")?;
    Ok(Some(properties))
}

fn find_device(ordinal: usize) -> Result<sys::CUdevice, DeviceError> {
    let (mut num_devices, mut device) = (0, 0);
    // SAFETY: the driver is loaded, and the device is one that it counts.
    unsafe {
        check(sys::cuDeviceGetCount(&mut num_devices), "be counted")?;
        if ordinal >= num_devices as usize {
            return Err(DeviceError(format!(
                "there is no GPU {ordinal}: the driver has {num_devices}, counted from 0 \
                 (CUDA_VISIBLE_DEVICES hides others); use --device cpu"
            )));
        }
        check(sys::cuDeviceGet(&mut device, ordinal as i32), "be opened")?;
    }
    Ok(device)
}

/// The context that CUDA's libraries share.
fn retain_context(device: sys::CUdevice) -> Result<sys::CUcontext, DeviceError> {
    let mut context = null_mut();
    // SAFETY: the device exists.
    let result = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
    check(result, "be opened").map(|()| context)
}

/// Programmatic dependent launch came with sm_90, and graphs support it from CUDA 12.3 on.
fn can_overlap_kernels(device: sys::CUdevice, driver_version: i32) -> Result<bool, DeviceError> {
    let mut major = 0;
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    // SAFETY: the device exists, and the attribute is an integer.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut major, attribute, device) };
    check(result, "tell its properties")?;
    Ok(major >= 9 && driver_version >= 12030)
}

fn launch_attribute(id: Id, value: sys::CUlaunchAttributeValue) -> sys::CUlaunchAttribute {
    let pad = [0; 4];
    sys::CUlaunchAttribute { id, pad, value }
}

/// All properties of the device except the sizes of its memory.
fn properties(device: sys::CUdevice, nvrtc: &Nvrtc) -> Result<DeviceProperties, DeviceError> {
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device exists, and the attribute is an integer.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check(result, "tell its properties").map(|()| value)
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut name = [0_u8; 256];
    // SAFETY: the buffer has the given length, and ends in zero afterwards.
    let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) };
    check(result, "tell its name")?;
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    if (major, minor) < OLDEST_CAPABILITY {
        return Err(DeviceError(format!(
            "{name} has compute capability {major}.{minor}, but 8.0 or later is needed; use --device cpu"
        )));
    }
    let num_multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let max_shared_bytes =
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let architecture = nvrtc.architecture((major, minor))?;
    Ok(DeviceProperties {
        name,
        uses_wgmma: wgmma::is_asked_for()? && architecture == wgmma::ARCHITECTURE,
        architecture,
        num_multiprocessors: num_multiprocessors as usize,
        max_shared_bytes: max_shared_bytes as usize,
        total_bytes: 0,
        free_bytes: 0,
    })
}

impl Device for GpuDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn allocate(&self, num_bytes: usize) -> Result<DevicePointer, DeviceError> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the context is current, and the memory has the given size.
        unsafe {
            let result = sys::cuMemAlloc_v2(&mut pointer, num_bytes);
            check(result, &format!("allocate {num_bytes} bytes"))?;
            check(
                sys::cuMemsetD8Async(pointer, 0, num_bytes, self.setup),
                "clear memory",
            )?;
            check(sys::cuStreamSynchronize(self.setup), "clear memory")?;
        }
        Ok(DevicePointer(pointer))
    }

    unsafe fn free(&self, pointer: DevicePointer) {
        // If the memory cannot be freed, the device is unusable, and the memory is lost with it.
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { sys::cuMemFree_v2(pointer.0) };
        }
    }

    fn allocate_pinned(&self, num_bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.bind()?;
        let mut pointer: *mut c_void = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current.
        let result = unsafe { sys::cuMemHostAlloc(&mut pointer, num_bytes, flags) };
        check(
            result,
            &format!("pin {num_bytes} bytes of the host's memory"),
        )?;
        // SAFETY: the memory is new, and has the given size.
        unsafe { pointer.cast::<u8>().write_bytes(0, num_bytes) };
        NonNull::new(pointer.cast())
            .ok_or_else(|| DeviceError("pinned memory has no address".into()))
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>, _: usize) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { sys::cuMemFreeHost(pointer.as_ptr().cast()) };
        }
    }

    fn load(&self, source: &ModuleSource, names: &[&str]) -> Result<Vec<Kernel>, DeviceError> {
        self.modules.ask_for(source, names)
    }

    fn finish_loading(&self) -> Result<(), DeviceError> {
        self.bind()?;
        self.modules.finish()
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_kernel(stream, kernel, grid, None, args) }
    }

    fn tensor_map(&self, tensor: &Tensor) -> Result<TensorMap, DeviceError> {
        tensor_maps::encode(tensor)
    }

    unsafe fn launch_clusters(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        cluster_blocks: u32,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_kernel(stream, kernel, grid, Some(cluster_blocks), args) }
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        self.bind()?;
        let products = self.products.get_or_init(|| Products::open(self.workspace));
        let products = products.as_ref().map_err(DeviceError::clone)?;
        // SAFETY: the caller's promise; both modules of bindings refer to the same type of the driver.
        unsafe { products.multiply(product, self.compute.cast()) }
    }

    unsafe fn copy(
        &self,
        stream: Stream,
        to: DevicePointer,
        from: DevicePointer,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        if num_bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's promise; the driver distinguishes pinned from device memory by its address.
        let result = unsafe { sys::cuMemcpyAsync(to.0, from.0, num_bytes, self.stream(stream)) };
        check(result, "copy memory")
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        self.bind()?;
        let mut pool = self.events.lock().unwrap();
        let index = match pool.idle.pop() {
            Some(index) => index,
            None => {
                let mut event = null_mut();
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: the context is current.
                let result = unsafe { sys::cuEventCreate(&mut event, flags) };
                check(result, "make an event")?;
                pool.events.push(event);
                pool.events.len() - 1
            }
        };
        // SAFETY: event and stream exist, and the event has no other holder.
        let result = unsafe { sys::cuEventRecord(pool.events[index], self.stream(stream)) };
        check(result, "record an event")?;
        Ok(Event(index as u64))
    }

    fn wait_on(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: event and stream exist.
        let result = unsafe { sys::cuStreamWaitEvent(self.stream(stream), self.event(event)?, 0) };
        check(result, "wait for an event")
    }

    fn is_done(&self, event: Event) -> Result<bool, DeviceError> {
        self.bind()?;
        // SAFETY: the event exists.
        match unsafe { sys::cuEventQuery(self.event(event)?) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(result, "do its work").map(|()| true),
        }
    }

    fn synchronize(&self, event: Event) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the event exists.
        let result = unsafe { sys::cuEventSynchronize(self.event(event)?) };
        self.events.lock().unwrap().idle.push(event.0 as usize);
        check(result, "do its work")
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.bind()?;
        // Other threads may still allocate and load.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream exists.
        let result = unsafe { sys::cuStreamBeginCapture_v2(self.compute, mode) };
        check(result, "begin a graph")
    }

    fn end_capture(&self) -> Result<Graph, DeviceError> {
        self.bind()?;
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the stream exists, and the graph is destroyed once.
        unsafe {
            check(
                sys::cuStreamEndCapture(self.compute, &mut graph),
                "end a graph",
            )?;
            let result = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
            sys::cuGraphDestroy(graph);
            check(result, "prepare a graph")?;
        }
        let mut graphs = self.graphs.write().unwrap();
        graphs.push(executable);
        Ok(Graph(graphs.len() as u64 - 1))
    }

    unsafe fn launch_graph(&self, graph: Graph) -> Result<(), DeviceError> {
        self.bind()?;
        let executable = { self.graphs.read().unwrap().get(graph.0 as usize).copied() };
        let executable =
            executable.ok_or_else(|| DeviceError(format!("no graph has number {}", graph.0)))?;
        // SAFETY: graph and stream exist; the caller vouches for the captured work.
        let result = unsafe { sys::cuGraphLaunch(executable, self.compute) };
        check(result, "launch a graph")
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        let streams = [self.compute, self.pages, self.setup];
        let streams = streams.into_iter().filter(|stream| !stream.is_null());
        // SAFETY: all of these belong to the device, and are unused once the streams are done. Errors of their work
        // have been reported, or no longer matter.
        unsafe {
            for stream in streams.clone() {
                let _ = sys::cuStreamSynchronize(stream);
            }
            self.products.take();
            for graph in inner(self.graphs.get_mut()).drain(..) {
                let _ = sys::cuGraphExecDestroy(graph);
            }
            for event in inner(self.events.get_mut()).events.drain(..) {
                let _ = sys::cuEventDestroy_v2(event);
            }
            self.modules.unload();
            for stream in streams {
                let _ = sys::cuStreamDestroy_v2(stream);
            }
            if self.workspace != DevicePointer::NULL {
                let _ = sys::cuMemFree_v2(self.workspace.0);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// The content of a lock, even after a panic of its holder.
fn inner<T>(lock: LockResult<T>) -> T {
    lock.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so_in_a_line() {
        // On a machine with a GPU, the error says that there is no GPU with this index.
        let error = GpuDevice::open(4096).unwrap_err().0;
        let reasons = [
            "no NVIDIA driver was found (libcuda.so.1): ",
            "there is no GPU 4096: the driver has ",
            "the GPU could not start: ",
        ];
        assert!(
            reasons.iter().any(|reason| error.starts_with(reason)),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
