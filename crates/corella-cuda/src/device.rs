//! The executor's interface to a device: memory, kernels, matrix products, and streams that keep an order.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use corella_model::DeviceError;

mod buffer;
mod compiler;
pub(crate) mod cubin;
mod cubin_cache;
mod driver;
mod dynamic_library;
#[cfg(feature = "emulated-device")]
mod emulated;
#[cfg(all(test, feature = "emulated-device"))]
mod faulty_device;
mod loaded_kernels;
mod nvrtc;
mod tensor_map;
#[cfg(feature = "emulated-device")]
mod test_device;

pub use buffer::{DeviceBuffer, PinnedBuffer};
pub use driver::{GpuDevice, find_gpu};
#[cfg(feature = "emulated-device")]
pub use emulated::EmulatedDevice;
#[cfg(all(test, feature = "emulated-device"))]
pub use faulty_device::{Fault, FaultyDevice};
#[cfg(feature = "kernel-table")]
pub(crate) use nvrtc::Nvrtc;
pub use tensor_map::{Tensor, TensorDim, TensorMap};
#[cfg(feature = "emulated-device")]
pub use test_device::test_device;

/// An address in a device's memory. Kernels take it as a pointer; the host must not follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    pub const NULL: Self = Self(0);

    pub fn add(self, num_bytes: usize) -> Self {
        Self(self.0 + num_bytes as u64)
    }
}

/// The properties of a device, for the start-up line and for the division of work.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    /// The driver's name, e.g. `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The architecture, such as `sm_90a`; `emulated` for the device in host memory.
    pub architecture: String,
    pub num_multiprocessors: usize,
    /// The most dynamic shared memory of a block, in bytes.
    pub max_shared_bytes: usize,
    /// Memory of the device in bytes: the total, and the free part when it was opened.
    pub total_bytes: usize,
    pub free_bytes: usize,
    /// Whether bf16 weights are multiplied by `wgmma` (`kernels/linear/hopper.rs`).
    pub uses_wgmma: bool,
}

/// Work on a stream runs in the order of submission; streams run concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// For steps.
    Compute,
    /// For copies of KV pages to and from the host.
    Pages,
}

/// A source of kernels and the values of its macros. The compiled code depends only on these and on the device's
/// architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSource {
    /// The name of a file in `src/kernels`, for errors.
    pub name: &'static str,
    /// The file's text, in which every `#include` names another file in `src/kernels`.
    pub text: &'static str,
    /// Macros, such as `("HEAD_DIM", "128")`.
    pub defines: Vec<(&'static str, String)>,
}

/// A kernel of a module that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub u64);

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: [u32; 3],
    /// Threads of a block, a multiple of 32.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl Grid {
    pub fn new(blocks: [usize; 3], threads: u32, shared_bytes: usize) -> Self {
        Self {
            blocks: blocks.map(|blocks| blocks as u32),
            threads,
            shared_bytes: shared_bytes as u32,
        }
    }
}

/// A point in a stream's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// Captured work of a stream, to be launched as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// A matrix product `out[m][n] = input[m][k] · weight[n][k]ᵀ`, all row-major, in bf16 with sums in f32 or all in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub input: DevicePointer,
    pub weight: DevicePointer,
    pub out: DevicePointer,
    /// The number of elements from one row of the output to the next.
    pub out_stride: usize,
    /// The type of input and weight.
    pub element: Element,
    pub out_element: Element,
    /// Whether the product is added to the content of `out`; otherwise it is overwritten.
    pub adds: bool,
}

impl Product {
    /// An empty product.
    pub const EMPTY: Self = Self {
        m: 0,
        n: 0,
        k: 0,
        input: DevicePointer::NULL,
        weight: DevicePointer::NULL,
        out: DevicePointer::NULL,
        out_stride: 0,
        element: Element::Bf16,
        out_element: Element::Bf16,
        adds: false,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F32,
    Bf16,
}

impl Element {
    /// Bytes of an element.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A device. All calls except `synchronize` and allocations return before their work is done. If the work fails, a
/// later call returns the error, and the device is unusable from then on.
pub trait Device: Send + Sync + fmt::Debug {
    fn properties(&self) -> &DeviceProperties;

    /// Zeroed memory, aligned to 256 bytes.
    fn allocate(&self, num_bytes: usize) -> Result<DevicePointer, DeviceError>;

    /// # Safety
    /// The memory came from `allocate` of this device, is freed once, and no work uses it.
    unsafe fn free(&self, pointer: DevicePointer);

    /// Memory of the host that the device reads and writes by the same address.
    fn allocate_pinned(&self, num_bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// # Safety
    /// As for `free`.
    unsafe fn free_pinned(&self, pointer: NonNull<u8>, num_bytes: usize);

    /// Compiles a source, or finds it among compiled ones, and returns the kernels of these names. Modules stay loaded
    /// while the device is open. A device may compile concurrently with other work, and then a launch waits for its
    /// kernel.
    fn load(&self, source: &ModuleSource, names: &[&str]) -> Result<Vec<Kernel>, DeviceError>;

    /// Waits for all compilations. Errors of compilations are returned here, or by a launch.
    fn finish_loading(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Launches a kernel with one parameter: the structure whose bytes are `args`.
    ///
    /// # Safety
    /// `args` has the kernel's parameter type. All memory that the kernel accesses belongs to this device, and no other
    /// work changes it while the kernel runs.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        args: &[u8],
    ) -> Result<(), DeviceError>;

    /// Describes a tensor to kernels that copy boxes of it.
    fn tensor_map(&self, _: &Tensor) -> Result<TensorMap, DeviceError> {
        Err(DeviceError("this device has no tensor maps".into()))
    }

    /// Launches a kernel whose blocks read each other's shared memory, in clusters of `cluster_blocks` neighbours.
    ///
    /// # Safety
    /// As for `launch`.
    unsafe fn launch_clusters(
        &self,
        _stream: Stream,
        _kernel: Kernel,
        _grid: Grid,
        _cluster_blocks: u32,
        _args: &[u8],
    ) -> Result<(), DeviceError> {
        Err(DeviceError("this device has no clusters of blocks".into()))
    }

    /// Computes a product on the compute stream with the vendor's library: fast, but the bits of a row may depend on
    /// `m`.
    ///
    /// # Safety
    /// As for `launch`.
    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError>;

    /// Copies between pinned memory and device memory, or within either.
    ///
    /// # Safety
    /// Both ranges are memory of this device or pinned. Until the stream has passed this copy, no other work writes the
    /// source or uses the target.
    unsafe fn copy(
        &self,
        stream: Stream,
        to: DevicePointer,
        from: DevicePointer,
        num_bytes: usize,
    ) -> Result<(), DeviceError>;

    /// Marks the end of a stream's present work.
    fn record(&self, stream: Stream) -> Result<Event, DeviceError>;

    /// Makes a stream wait for an event of another stream.
    fn wait_on(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;

    /// Whether everything before the event is done.
    fn is_done(&self, event: Event) -> Result<bool, DeviceError>;

    /// Blocks until everything before the event is done, and forgets the event.
    fn synchronize(&self, event: Event) -> Result<(), DeviceError>;

    /// Begins a capture: work on the compute stream is recorded instead of run.
    fn begin_capture(&self) -> Result<(), DeviceError>;

    /// Ends a capture. The graph stays while the device is open.
    fn end_capture(&self) -> Result<Graph, DeviceError>;

    /// Runs a graph on the compute stream.
    ///
    /// # Safety
    /// As for all captured launches.
    unsafe fn launch_graph(&self, graph: Graph) -> Result<(), DeviceError>;
}

/// A device, which stays open while an object on it lives.
pub type SharedDevice = Arc<dyn Device>;
