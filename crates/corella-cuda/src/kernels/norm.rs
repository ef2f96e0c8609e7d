//! The step between two matrix products: a branch is added to the residual stream, and the sum is normed for the next
//! product.

use corella_model::{DeviceError, NormKind, NormSpec};

use crate::device::{DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::{args_bytes, element_macro, load_kernel};

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

/// The elements that a thread moves at a time (`chunk.cuh`).
pub(super) const CHUNK: usize = 8;
const MAX_THREADS: usize = 1024;

/// The kernel for rows of one length, and the types that it reads and writes.
#[derive(Debug)]
pub struct NormKernel {
    kernel: Kernel,
    hidden: usize,
}

/// A norm whose weights are on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceNorm {
    pub spec: NormSpec,
    /// `[hidden]` in f32.
    pub weight: DevicePointer,
    /// `[hidden]` in f32; `DevicePointer::NULL` without a bias.
    pub bias: DevicePointer,
}

/// The addition to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Branch {
    /// `[row][hidden]`, in the type that the kernel was loaded for.
    pub values: DevicePointer,
    /// The norm that is applied to the values first.
    pub after: Option<DeviceNorm>,
    /// The factor of the values after that norm.
    pub residual_scale: f32,
}

/// The rows to norm.
#[derive(Clone, Copy, Debug)]
pub enum NormRows {
    /// The first rows.
    First(usize),
    /// The rows with the numbers in `index`, `u32`s. With a branch, no row may occur twice.
    Selected { index: DevicePointer, len: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct NormStep {
    /// `[row][hidden]` in f32.
    pub residual: DevicePointer,
    pub rows: NormRows,
    pub branch: Option<Branch>,
    /// The norm of the sum. Without one, the sum is only converted.
    pub before: Option<DeviceNorm>,
    /// `[row][hidden]`, with only the selected rows in the order of `index`; `DevicePointer::NULL` if only the residual
    /// stream changes.
    pub out: DevicePointer,
}

#[repr(C)]
struct NormWeights {
    weight: DevicePointer,
    bias: DevicePointer,
    kind: u32,
    eps: f32,
}

#[repr(C)]
struct NormArgs {
    residual: DevicePointer,
    index: DevicePointer,
    branch: DevicePointer,
    out: DevicePointer,
    after: NormWeights,
    before: NormWeights,
    residual_scale: f32,
    hidden: u32,
}

impl NormKernel {
    /// Compiles the kernel for rows of `hidden` elements, branches of one type and outputs of another.
    pub fn load(
        device: &SharedDevice,
        hidden: usize,
        branch: Element,
        out: Element,
    ) -> Result<Self, DeviceError> {
        let chunks = hidden.div_ceil(CHUNK * row_threads(hidden) as usize);
        let text = include_str!("norm.cu");
        let defines = vec![
            ("BRANCH", element_macro(branch)),
            ("OUT", element_macro(out)),
            ("CHUNKS", chunks.to_string()),
        ];
        Ok(Self {
            kernel: load_kernel(device, "norm.cu", text, "residual_norm", defines)?,
            hidden,
        })
    }

    /// # Safety
    /// All of `step` is memory of this device with the sizes of the shapes; see also `Device::launch`.
    pub unsafe fn launch(&self, device: &SharedDevice, step: &NormStep) -> Result<(), DeviceError> {
        let (index, num_rows) = match step.rows {
            NormRows::First(num_rows) => (DevicePointer::NULL, num_rows),
            NormRows::Selected { index, len } => (index, len),
        };
        if num_rows == 0 {
            return Ok(());
        }
        let branch = step.branch;
        let args = NormArgs {
            residual: step.residual,
            index,
            branch: branch.map_or(DevicePointer::NULL, |branch| branch.values),
            out: step.out,
            after: NormWeights::new(branch.and_then(|branch| branch.after)),
            before: NormWeights::new(step.before),
            residual_scale: branch.map_or(1.0, |branch| branch.residual_scale),
            hidden: self.hidden as u32,
        };
        let grid = Grid::new([num_rows, 1, 1], row_threads(self.hidden), 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.kernel, grid, args_bytes(&args)) }
    }
}

impl NormWeights {
    fn new(norm: Option<DeviceNorm>) -> Self {
        let Some(norm) = norm else {
            return Self {
                weight: DevicePointer::NULL,
                bias: DevicePointer::NULL,
                kind: 0,
                eps: 0.0,
            };
        };
        Self {
            weight: norm.weight,
            bias: norm.bias,
            kind: match norm.spec.kind {
                NormKind::Rms => 1,
                NormKind::Layer { .. } => 2,
            },
            eps: norm.spec.eps,
        }
    }
}

/// The threads of a block for one row: one for each chunk, up to the limit of a block.
pub(super) fn row_threads(len: usize) -> u32 {
    len.div_ceil(CHUNK)
        .next_multiple_of(32)
        .clamp(32, MAX_THREADS) as u32
}
