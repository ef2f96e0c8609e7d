//! Sums of products of a matrix's columns with each other. They are not in the kernel table,
//! because only calibration needs them.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Isa;

/// The number of columns that `add_products` takes at once.
pub const PRODUCT_LANES: usize = 32;

/// `out[a][j] += Σ_row x[row][first + a] * x[row][j]` for a below 32 and j from `first` to `len`,
/// both multiples of 32. Rows of `x` are `stride` elements apart, rows of `out` `len` elements.
///
/// # Safety
/// The machine has the instruction set, `x` has `num_rows` rows of `len` elements, and `out` has 32 rows.
// Arguments: a kernel's operands stay in registers.
pub unsafe fn add_products(
    isa: Isa,
    x: *const f32,
    stride: usize,
    num_rows: usize,
    first: usize,
    len: usize,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => {
                avx512(x, stride, num_rows, first, len, out)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(x, stride, num_rows, first, len, out),
            _ => tiles::<4, 8, false>(x, stride, num_rows, first, len, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(
    x: *const f32,
    stride: usize,
    num_rows: usize,
    first: usize,
    len: usize,
    out: *mut f32,
) {
    const ROWS: usize = 8;
    for j in (first..len).step_by(32) {
        for a in (0..PRODUCT_LANES).step_by(ROWS) {
            // SAFETY: all columns of `x` are below `len`, and `out` has 32 rows.
            unsafe {
                let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
                for row in 0..num_rows {
                    let x = x.add(row * stride);
                    let right = [_mm512_loadu_ps(x.add(j)), _mm512_loadu_ps(x.add(j + 16))];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let left = _mm512_set1_ps(*x.add(first + a + r));
                        sums[0] = _mm512_fmadd_ps(left, right[0], sums[0]);
                        sums[1] = _mm512_fmadd_ps(left, right[1], sums[1]);
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (half, sum) in sums.iter().enumerate() {
                        let out = out.add((a + r) * len + j + half * 16);
                        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), *sum));
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(
    x: *const f32,
    stride: usize,
    num_rows: usize,
    first: usize,
    len: usize,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { tiles::<4, 16, true>(x, stride, num_rows, first, len, out) };
}

/// Computes the products in tiles whose sums fit into the processor's registers.
#[inline(always)]
unsafe fn tiles<const ROWS: usize, const LANES: usize, const FUSED: bool>(
    x: *const f32,
    stride: usize,
    num_rows: usize,
    first: usize,
    len: usize,
    out: *mut f32,
) {
    for j in (first..len).step_by(LANES) {
        for a in (0..PRODUCT_LANES).step_by(ROWS) {
            // SAFETY: all columns of `x` are below `len`, and `out` has 32 rows.
            unsafe {
                let mut sums = [[0.0f32; LANES]; ROWS];
                for row in 0..num_rows {
                    let x = x.add(row * stride);
                    let right = *x.add(j).cast::<[f32; LANES]>();
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let left = *x.add(first + a + r);
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = match FUSED {
                                true => left.mul_add(right, *sum),
                                false => *sum + left * right,
                            };
                        }
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    let out = &mut *out.add((a + r) * len + j).cast::<[f32; LANES]>();
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out += sum;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_supported;
    use super::*;

    #[test]
    fn products_are_summed_in_every_place() {
        let (num_rows, len, stride) = (37, 96, 112);
        let x: Vec<f32> = (0..num_rows * stride)
            .map(|i| ((i * 7919) % 41) as f32 - 20.0)
            .collect();
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            if !is_supported(isa) {
                continue;
            }
            for first in [0, 32, 64] {
                let mut out = vec![1.0; PRODUCT_LANES * len];
                // SAFETY: the sizes are those that the function demands.
                unsafe {
                    let out = out.as_mut_ptr();
                    add_products(isa, x.as_ptr(), stride, num_rows, first, len, out);
                }
                for (at, &sum) in out.iter().enumerate() {
                    let (a, j) = (at / len, at % len);
                    let products = (0..num_rows).map(|row| {
                        let row = &x[row * stride..];
                        row[first + a] * row[j]
                    });
                    // Integers are summed exactly in any order.
                    let expected = if j < first {
                        0.0
                    } else {
                        products.sum::<f32>()
                    };
                    assert_eq!(sum, 1.0 + expected, "{isa} {first} {a} {j}");
                }
            }
        }
    }
}
