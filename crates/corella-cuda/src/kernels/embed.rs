//! Embeddings of the step's tokens: the beginning of the residual stream.

use corella_model::DeviceError;

use crate::device::{DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::norm::row_threads;
use super::{args_bytes, element_macro, load_kernel};

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

/// A row of a step in the layout of kernels (`step_row.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Row {
    /// The token; negative for the slot's draw in an earlier step.
    pub token: i32,
    pub position: i32,
    pub slot: u32,
    pub span: u32,
}

impl Row {
    /// A row that pads a step.
    pub const PADDING: Self = Self {
        token: 0,
        position: -1,
        slot: 0,
        span: 0,
    };
}

#[derive(Debug)]
pub struct EmbedKernel {
    kernel: Kernel,
}

/// The input and output of a step's embeddings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EmbedArgs {
    /// The step's rows: token, position, slot, span. A row of position -1 is left unchanged. A negative token stands
    /// for the slot's token in `drawn`.
    pub rows: DevicePointer,
    /// `[slot]`: the token that an earlier step drew, a `u32`.
    pub drawn: DevicePointer,
    /// `[vocab_size][hidden]`.
    pub embedding: DevicePointer,
    /// `[position][hidden]`, added to the scaled embeddings; `DevicePointer::NULL` without learned positions.
    pub positions: DevicePointer,
    /// `[row][hidden]` in f32, which are written.
    pub residual: DevicePointer,
    /// `[slot][max_len]`: the token at each position, a `u32`, which is written.
    pub history: DevicePointer,
    pub hidden: u32,
    pub max_len: u32,
    /// The factor of embeddings.
    pub scale: f32,
    pub vocab_size: u32,
}

impl EmbedKernel {
    /// Compiles the kernel for tables of an element type.
    pub fn load(device: &SharedDevice, element: Element) -> Result<Self, DeviceError> {
        let text = include_str!("embed.cu");
        let defines = vec![("ELEMENT", element_macro(element))];
        Ok(Self {
            kernel: load_kernel(device, "embed.cu", text, "embed", defines)?,
        })
    }

    /// # Safety
    /// All of `args` is memory of this device with the sizes of the shapes; see also `Device::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        num_rows: usize,
        args: &EmbedArgs,
    ) -> Result<(), DeviceError> {
        if num_rows == 0 {
            return Ok(());
        }
        let grid = Grid::new([num_rows, 1, 1], row_threads(args.hidden as usize), 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.kernel, grid, args_bytes(args)) }
    }
}
