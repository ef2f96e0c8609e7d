//! Tensor maps, with which a thread of a kernel copies whole boxes of a tensor, on GPUs that support them.

use super::DevicePointer;

/// A tensor of bf16, and the box of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The tensor's address, aligned to 16 bytes.
    pub address: DevicePointer,
    /// The dimensions, the innermost first. Neighbours in the innermost dimension are adjacent. A box has 64 elements
    /// in the innermost dimension, which become swizzled rows of 128 bytes in shared memory.
    pub dims: Vec<TensorDim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDim {
    pub len: usize,
    /// The distance from one index to the next in bytes, a multiple of 16 in all dimensions except the innermost.
    pub stride_bytes: usize,
    /// The number of elements of the box, at most 256. Elements beyond the tensor are copied as zeros.
    pub box_len: usize,
}

/// A tensor map as kernels take it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);
