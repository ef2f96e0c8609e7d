//! Tensor maps: a kernel's threads copy whole boxes of a tensor, on GPUs that support it.

use super::DevicePointer;

/// A tensor of bf16, and the box of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Aligned to 16 bytes.
    pub address: DevicePointer,
    /// From the innermost, whose elements are adjacent. Its box has 64, which become swizzled rows of 128 bytes in
    /// shared memory.
    pub dims: Vec<TensorDim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDim {
    pub len: usize,
    /// From one index to the next, a multiple of 16 in all dimensions except the innermost.
    pub stride_bytes: usize,
    /// At most 256. Elements beyond the tensor are copied as zeros.
    pub box_len: usize,
}

/// A tensor in the form for kernels.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);
