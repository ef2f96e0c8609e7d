//! Lanes of weight panels: the source of an output channel, and its weights as numbers.

use corella_model::{DType, Tensor};
use half::{bf16, f16};

use crate::kernels::Kernels;

/// The source of one output channel.
#[derive(Clone, Copy)]
pub struct Lane<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub row: usize,
}

/// Decodes the weights of one output channel to f32, times the Hadamard matrix if `hadamard` is set.
pub fn decode_lane(
    source: &Lane<'_>,
    hadamard: bool,
    kernels: &Kernels,
    scratch: &mut Vec<u8>,
    out: &mut [f32],
) {
    let dtype = source.weight.dtype;
    let bytes = source.weight.row(source.row, scratch);
    assert_eq!(bytes.len(), out.len() * dtype.size());
    if dtype == DType::Bf16 {
        // Most checkpoints are bf16; the compiler vectorises this loop.
        for (value, &[low, high]) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
        }
    } else {
        for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
            *value = decode(bytes, dtype);
        }
    }
    if hadamard {
        // SAFETY: the pointer and the length are those of `out`, a multiple of the transform's order.
        unsafe { (kernels.hadamard)(out.as_mut_ptr(), out.len()) };
    }
}

/// Rounds to integers from -127 to 127 and returns their scale, `max |x| / 127`.
///
/// # Safety
/// `out` has room for `row.len()` integers.
pub unsafe fn round_to_bytes(row: &[f32], kernels: &Kernels, out: *mut i8) -> f32 {
    // SAFETY: by the caller's contract the output has enough room.
    unsafe {
        let most = f32::from_bits((kernels.largest_bits)(row.as_ptr(), row.len()));
        let scale = most / 127.0;
        let inverse = match scale > 0.0 {
            true => (127.0 / most).min(f32::MAX),
            false => 0.0,
        };
        (kernels.quantise)(row.as_ptr(), row.len(), inverse, out);
        scale
    }
}

/// Element `index` of a tensor, in row-major order, as f32.
pub fn element(tensor: &Tensor, index: usize) -> f32 {
    let size = tensor.dtype.size();
    decode(&tensor.bytes()[index * size..][..size], tensor.dtype)
}

/// All elements of a tensor as f32, in row-major order.
pub fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor
        .bytes()
        .chunks_exact(tensor.dtype.size())
        .map(|bytes| decode(bytes, tensor.dtype))
        .collect()
}

pub fn decode(bytes: &[u8], dtype: DType) -> f32 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => unreachable!("a {dtype:?} element cannot have {} bytes", bytes.len()),
    }
}
