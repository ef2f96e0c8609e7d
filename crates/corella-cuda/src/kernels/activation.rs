//! The activation function of a feed-forward layer, and the product with the gated values.

use corella_model::{Activation, DeviceError};

use crate::device::{DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::norm::CHUNK;
use super::{args_bytes, element_macro, load_kernel};

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

const NUM_THREADS: usize = 128;

#[derive(Debug)]
pub struct ActivationKernel {
    kernel: Kernel,
    is_gated: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct ActivationStep {
    pub num_rows: usize,
    /// The elements of an output row.
    pub width: usize,
    /// `[row][width]`, or `[row][gates, values][width]` for a gated layer.
    pub input: DevicePointer,
    /// `[row][width]`. It may begin at the address of `input` only if the layer is not gated.
    pub out: DevicePointer,
}

#[repr(C)]
struct ActivationArgs {
    input: DevicePointer,
    out: DevicePointer,
    width: u32,
    is_gated: u32,
}

impl ActivationKernel {
    pub fn load(
        device: &SharedDevice,
        activation: Activation,
        is_gated: bool,
        element: Element,
    ) -> Result<Self, DeviceError> {
        let text = include_str!("activation.cu");
        let defines = vec![
            ("ELEMENT", element_macro(element)),
            ("ACTIVATION", activation_macro(activation)),
        ];
        Ok(Self {
            kernel: load_kernel(device, "activation.cu", text, "activation", defines)?,
            is_gated,
        })
    }

    /// # Safety
    /// All of `step` is memory of this device with the sizes of the shapes; see also `Device::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        step: &ActivationStep,
    ) -> Result<(), DeviceError> {
        if step.num_rows == 0 {
            return Ok(());
        }
        let args = ActivationArgs {
            input: step.input,
            out: step.out,
            width: step.width as u32,
            is_gated: u32::from(self.is_gated),
        };
        let blocks = step.width.div_ceil(CHUNK * NUM_THREADS);
        let grid = Grid::new([step.num_rows, blocks, 1], NUM_THREADS as u32, 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.kernel, grid, args_bytes(&args)) }
    }
}

/// The macro `ACTIVATION`.
pub(super) fn activation_macro(activation: Activation) -> String {
    String::from(match activation {
        Activation::Silu => "SILU",
        Activation::Gelu => "GELU",
        Activation::GeluTanh => "GELU_TANH",
        Activation::GeluSigmoid => "GELU_SIGMOID",
    })
}
