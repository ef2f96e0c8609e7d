//! Rounding a row to 8 bits by its largest magnitude costs most where few elements are large, as in
//! what gated layers put out. A Hadamard matrix spreads each over 16 elements: rows times the matrix
//! and weights times its inverse give the same products (QuaRot, arXiv 2404.00456).

/// Order of the matrix. Its entries are ±1/4, and it is its own inverse.
pub const HADAMARD_ORDER: usize = 16;
/// Transforms side by side.
const LANES: usize = 16;

/// Element i of each transform lies `n / HADAMARD_ORDER` behind element i - 1: vectors never mix
/// their own lanes, and neighbours, which are often large together, part.
///
/// # Safety
/// See `Kernels::hadamard`.
#[inline(always)]
pub unsafe fn hadamard(x: *mut f32, n: usize) {
    let stride = n / HADAMARD_ORDER;
    let mut i = 0;
    // SAFETY: the caller's promise; vectors end at `stride`.
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
/// `HADAMARD_ORDER` vectors, `stride` apart.
#[inline(always)]
unsafe fn transform<const N: usize>(x: *mut f32, stride: usize) {
    let mut vectors = [[0.0; N]; HADAMARD_ORDER];
    for (i, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *vector = unsafe { x.add(i * stride).cast::<[f32; N]>().read_unaligned() };
    }
    add_and_subtract::<1, N>(&mut vectors);
    add_and_subtract::<2, N>(&mut vectors);
    add_and_subtract::<4, N>(&mut vectors);
    add_and_subtract::<8, N>(&mut vectors);
    for (i, vector) in vectors.iter_mut().enumerate() {
        vector.iter_mut().for_each(|value| *value *= 0.25);
        // SAFETY: the caller's promise.
        unsafe {
            x.add(i * stride)
                .cast::<[f32; N]>()
                .write_unaligned(*vector)
        };
    }
}

/// Pairs of vectors that are `HALF` apart. All indices are known when this is compiled, so that vectors
/// stay in registers.
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
