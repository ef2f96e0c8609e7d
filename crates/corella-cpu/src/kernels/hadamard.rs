//! The Hadamard transform of rows before quantisation.
//!
//! Quantising a row to 8 bits by its largest magnitude loses most where a few elements are much larger than the rest,
//! as in the output of gated layers. A Hadamard matrix spreads each element over 16. Rows times the matrix, and weights
//! times its inverse, give the same products (QuaRot, arXiv 2404.00456).
//!
//! The down projections of a checkpoint with 8-bit weights are multiplied by the inverse, too, and must then be
//! quantised for a second time. That loses less than the rows lose without the transform.

/// The order of the matrix. Its entries are ±1/4, and it is its own inverse.
pub const HADAMARD_ORDER: usize = 16;
/// The number of transforms that are computed side by side.
const LANES: usize = 16;

/// Transforms a row in place. Element i of each transform lies `n / HADAMARD_ORDER` after element i - 1. So vectors
/// never mix their own lanes, and neighbouring elements, which are often large together, go to different transforms.
///
/// # Safety
/// See `Kernels::hadamard`.
#[inline(always)]
pub unsafe fn hadamard(x: *mut f32, n: usize) {
    let stride = n / HADAMARD_ORDER;
    let mut i = 0;
    // SAFETY: the caller promises `n` elements, and vectors end at `stride`.
    unsafe {
        while i + LANES <= stride {
            transform::<LANES>(x.add(i), stride);
            i += LANES;
        }
        while i < stride {
            transform::<1>(x.add(i), stride);
            i += 1;
        }
    }
}

/// # Safety
/// At `x` there are `HADAMARD_ORDER` vectors of N elements, `stride` apart.
#[inline(always)]
unsafe fn transform<const N: usize>(x: *mut f32, stride: usize) {
    let mut vectors = [[0.0; N]; HADAMARD_ORDER];
    for (i, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: the caller upholds the contract.
        *vector = unsafe { x.add(i * stride).cast::<[f32; N]>().read_unaligned() };
    }
    add_and_subtract::<1, N>(&mut vectors);
    add_and_subtract::<2, N>(&mut vectors);
    add_and_subtract::<4, N>(&mut vectors);
    add_and_subtract::<8, N>(&mut vectors);
    for (i, vector) in vectors.iter_mut().enumerate() {
        vector.iter_mut().for_each(|value| *value *= 0.25);
        // SAFETY: the caller upholds the contract.
        unsafe {
            x.add(i * stride)
                .cast::<[f32; N]>()
                .write_unaligned(*vector)
        };
    }
}

/// Replaces pairs of vectors that are `HALF` apart by their sums and differences. All indices are
/// compile-time constants, so that the vectors stay in registers.
#[inline(always)]
fn add_and_subtract<const HALF: usize, const N: usize>(vectors: &mut [[f32; N]; HADAMARD_ORDER]) {
    for i in 0..HADAMARD_ORDER {
        if i & HALF == 0 {
            let (a, b) = (vectors[i], vectors[i + HALF]);
            for lane in 0..N {
                vectors[i][lane] = a[lane] + b[lane];
                vectors[i + HALF][lane] = a[lane] - b[lane];
            }
        }
    }
}
