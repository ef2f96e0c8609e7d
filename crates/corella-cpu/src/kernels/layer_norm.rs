//! Layer norms: the mean and the variance of a row, and its normalised elements. Each instruction set has its own
//! compiled copy, and all copies compute the same bits.

use super::sum_lanes;

/// The number of elements that are computed side by side.
const LANES: usize = 16;

/// # Safety
/// See `Kernels::moments`.
#[inline(always)]
pub unsafe fn moments(x: *const f32, n: usize) -> [f32; 2] {
    // SAFETY: the caller upholds the contract.
    let x = unsafe { std::slice::from_raw_parts(x, n) };
    let mean = sum_of(x, |x| x) / n as f32;
    // A second pass is needed: a difference of large sums of squares would lose the precision of the variance.
    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / n as f32;
    [mean, variance]
}

#[inline(always)]
fn sum_of(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for j in 0..LANES {
            sums[j] += term(chunk[j]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += term(*x);
    }
    sum_lanes(&sums)
}

/// # Safety
/// See `Kernels::weigh_centred`.
#[inline(always)]
pub unsafe fn weigh_centred(
    x: *const f32,
    weight: *const f32,
    bias: *const f32,
    [mean, scale]: [f32; 2],
    n: usize,
    out: *mut f32,
) {
    // SAFETY: the caller promises `n` elements of each.
    let (x, weight, bias, out) = unsafe {
        (
            std::slice::from_raw_parts(x, n),
            std::slice::from_raw_parts(weight, n),
            std::slice::from_raw_parts(bias, n),
            std::slice::from_raw_parts_mut(out, n),
        )
    };
    for i in 0..n {
        out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    }
}
