//! The device of tests with faults of a GPU.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use corella_model::DeviceError;

use super::{
    Device, DevicePointer, DeviceProperties, Event, Graph, Grid, Kernel, ModuleSource, Product,
    SharedDevice, Stream, Tensor, TensorMap, test_device,
};

/// The kind of fault that occurs from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Launches on a stream are refused.
    Launches(Stream),
    /// Launches are refused while a graph is captured, which invalidates the graph.
    Captures,
    /// The device accepts work, but this work and all later work fails.
    Work,
}

#[derive(Debug)]
pub struct FaultyDevice {
    device: SharedDevice,
    fault: Mutex<Option<Fault>>,
    captures: AtomicBool,
}

impl FaultyDevice {
    pub fn open() -> Self {
        Self {
            device: test_device(),
            fault: Mutex::default(),
            captures: AtomicBool::new(false),
        }
    }

    pub fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = Some(fault);
    }

    fn fail_launch(&self, stream: Stream) -> Result<(), DeviceError> {
        let captures = self.captures.load(Ordering::Relaxed);
        let is_met =
            |fault| fault == Fault::Launches(stream) || fault == Fault::Captures && captures;
        self.fail_if(is_met, "the launch was refused")
    }

    fn fail_if(&self, is_met: impl Fn(Fault) -> bool, error: &str) -> Result<(), DeviceError> {
        match *self.fault.lock().unwrap() {
            Some(fault) if is_met(fault) => Err(DeviceError(error.into())),
            _ => Ok(()),
        }
    }
}

impl Device for FaultyDevice {
    fn properties(&self) -> &DeviceProperties {
        self.device.properties()
    }

    fn allocate(&self, num_bytes: usize) -> Result<DevicePointer, DeviceError> {
        self.device.allocate(num_bytes)
    }

    unsafe fn free(&self, pointer: DevicePointer) {
        // SAFETY: the caller's promise.
        unsafe { self.device.free(pointer) };
    }

    fn allocate_pinned(&self, num_bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.device.allocate_pinned(num_bytes)
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>, num_bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.device.free_pinned(pointer, num_bytes) };
    }

    fn load(&self, source: &ModuleSource, names: &[&str]) -> Result<Vec<Kernel>, DeviceError> {
        self.device.load(source, names)
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        self.fail_launch(stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(stream, kernel, grid, args) }
    }

    fn tensor_map(&self, tensor: &Tensor) -> Result<TensorMap, DeviceError> {
        self.device.tensor_map(tensor)
    }

    unsafe fn launch_clusters(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        cluster_blocks: u32,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        self.fail_launch(stream)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.device
                .launch_clusters(stream, kernel, grid, cluster_blocks, args)
        }
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.device.multiply(product) }
    }

    unsafe fn copy(
        &self,
        stream: Stream,
        to: DevicePointer,
        from: DevicePointer,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.device.copy(stream, to, from, num_bytes) }
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        self.device.record(stream)
    }

    fn wait_on(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        self.device.wait_on(stream, event)
    }

    fn is_done(&self, event: Event) -> Result<bool, DeviceError> {
        self.device.is_done(event)
    }

    fn synchronize(&self, event: Event) -> Result<(), DeviceError> {
        self.device.synchronize(event)?;
        self.fail_if(|fault| fault == Fault::Work, "the work went wrong")
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.captures.store(true, Ordering::Relaxed);
        self.device.begin_capture()
    }

    fn end_capture(&self) -> Result<Graph, DeviceError> {
        self.captures.store(false, Ordering::Relaxed);
        let graph = self.device.end_capture()?;
        self.fail_if(|fault| fault == Fault::Captures, "the capture is spoilt")?;
        Ok(graph)
    }

    unsafe fn launch_graph(&self, graph: Graph) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.device.launch_graph(graph) }
    }
}
