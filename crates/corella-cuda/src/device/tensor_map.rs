//! Tensors of which a kernel's threads copy whole boxes, on GPUs that can.

use super::DevicePointer;

/// A tensor of bf16, and the box that one copy takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Aligned to 16 bytes.
    pub address: DevicePointer,
    /// From the innermost, whose elements are side by side. Its box has 64, of which shared memory gets rows of 128
    /// bytes, swizzled.
    pub dims: Vec<TensorDim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDim {
    pub len: usize,
    /// From one index to the next, a multiple of 16 in all dimensions but the innermost.
    pub stride_bytes: usize,
    /// At most 256. What lies beyond the tensor is copied as zeros.
    pub box_len: usize,
}

/// A tensor as kernels take it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);
