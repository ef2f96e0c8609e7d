//! The kernel that reports a step's progress to threads of the host.

use corella_model::DeviceError;

use crate::device::{DevicePointer, Grid, Kernel, SharedDevice, Stream};

use super::{args_bytes, load_kernel};

/// The id of the executor's internal steps, which no thread waits for.
pub const NO_STEP: u64 = u64::MAX;

#[derive(Debug)]
pub struct ProgressKernel(Kernel);

#[repr(C)]
struct ProgressArgs {
    step: DevicePointer,
    progress: DevicePointer,
    num_layers: u32,
    padding: u32,
}

impl ProgressKernel {
    pub fn load(device: &SharedDevice) -> Result<Self, DeviceError> {
        let text = include_str!("progress.cu");
        load_kernel(device, "progress.cu", text, "progress", Vec::new()).map(Self)
    }

    /// Copies the u64 at `step` to `progress`, with `num_layers` in its lower bits.
    ///
    /// # Safety
    /// Both addresses are valid; `progress` may be in pinned memory.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        step: DevicePointer,
        progress: DevicePointer,
        num_layers: usize,
    ) -> Result<(), DeviceError> {
        let args = ProgressArgs {
            step,
            progress,
            num_layers: num_layers as u32,
            padding: 0,
        };
        let grid = Grid::new([1, 1, 1], 32, 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.0, grid, args_bytes(&args)) }
    }
}
