//! Products with the thin matrices of adapters. Each instruction set has its own compiled copy, and all
//! copies compute the same bits.

use corella_model::DType;

use super::prefetch::fetch;
use super::{PANEL_LANES, sum_lanes};

/// The first product of an adapter: a row times each row of a thin matrix.
pub struct LowRankDown {
    pub x: *const f32,
    /// The length of `x` and of each row of the matrix.
    pub k: usize,
    /// The matrix, `[rank][k]`, in f32 or bf16.
    pub matrix: *const u8,
    pub dtype: DType,
    pub rank: usize,
    /// The destination of the `rank` sums.
    pub out: *mut f32,
}

/// The second product of an adapter: the outputs of the first product, times neighbouring output channels.
pub struct LowRankUp {
    /// The `rank` sums of the first product.
    pub x: *const f32,
    pub rank: usize,
    /// The matrix, `[rank][num_lanes]`, in f32 or bf16.
    pub matrix: *const u8,
    pub dtype: DType,
    pub num_lanes: usize,
    /// The `num_lanes` outputs that the products are added to.
    pub out: *mut f32,
}

/// The number of elements that are multiplied at a time.
const CHUNK: usize = 16;

/// # Safety
/// Pointers are valid for the extents that [`LowRankDown`] names.
#[inline(always)]
pub unsafe fn low_rank_down(product: LowRankDown) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match product.dtype {
            DType::F32 => down::<f32>(product),
            DType::Bf16 | DType::F16 => down::<Bf16>(product),
        }
    }
}

/// # Safety
/// Pointers are valid for the extents that [`LowRankUp`] names.
#[inline(always)]
pub unsafe fn low_rank_up(product: LowRankUp) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match product.dtype {
            DType::F32 => up::<f32>(product),
            DType::Bf16 | DType::F16 => up::<Bf16>(product),
        }
    }
}

/// The number of rows that are multiplied side by side: enough of them that additions do not wait for each other. The
/// number changes no bits.
const AT_ONCE: usize = 4;

#[inline(always)]
unsafe fn down<T: Element>(product: LowRankDown) {
    let LowRankDown {
        x, k, rank, out, ..
    } = product;
    let matrix = product.matrix.cast::<T>();
    let mut row = 0;
    // SAFETY: the caller promises `k` elements of `x` and of each of `rank` rows, and as many outputs.
    unsafe {
        while row + AT_ONCE <= rank {
            down_rows::<T, AT_ONCE>(x, k, matrix.add(row * k), out.add(row));
            row += AT_ONCE;
        }
        while row < rank {
            down_rows::<T, 1>(x, k, matrix.add(row * k), out.add(row));
            row += 1;
        }
    }
}

/// # Safety
/// There are `k` elements of `x` and of each of `N` rows of the matrix, and `N` outputs.
#[inline(always)]
unsafe fn down_rows<T: Element, const N: usize>(
    x: *const f32,
    k: usize,
    matrix: *const T,
    out: *mut f32,
) {
    let mut sums = [[0.0_f32; CHUNK]; N];
    let mut i = 0;
    // SAFETY: the caller upholds the contract.
    unsafe {
        while i + CHUNK <= k {
            let x = x.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            for (row, sums) in sums.iter_mut().enumerate() {
                let weights = matrix.add(row * k + i);
                let weights = weights.cast::<[T; CHUNK]>().read_unaligned();
                for j in 0..CHUNK {
                    sums[j] += x[j] * weights[j].to_f32();
                }
            }
            i += CHUNK;
        }
        while i < k {
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = matrix.add(row * k + i).read_unaligned();
                sums[i % CHUNK] += *x.add(i) * weight.to_f32();
            }
            i += 1;
        }
        for (row, sums) in sums.iter().enumerate() {
            *out.add(row) = sum_lanes(sums);
        }
    }
}

#[inline(always)]
unsafe fn up<T: Element>(product: LowRankUp) {
    let LowRankUp {
        x,
        rank,
        num_lanes,
        out,
        ..
    } = product;
    let matrix = product.matrix.cast::<T>();
    let mut lane = 0;
    // SAFETY: the caller promises `rank` rows of `num_lanes` elements, and as many outputs.
    unsafe {
        while lane + PANEL_LANES <= num_lanes {
            const CHUNKS: usize = PANEL_LANES / CHUNK;
            up_lanes::<T, CHUNKS>(x, rank, matrix.add(lane), num_lanes, out.add(lane));
            lane += PANEL_LANES;
        }
        while lane + CHUNK <= num_lanes {
            up_lanes::<T, 1>(x, rank, matrix.add(lane), num_lanes, out.add(lane));
            lane += CHUNK;
        }
        while lane < num_lanes {
            let mut sum = 0.0;
            for row in 0..rank {
                let weights = matrix.add(row * num_lanes + lane);
                sum += *x.add(row) * weights.read_unaligned().to_f32();
            }
            *out.add(lane) += sum;
            lane += 1;
        }
    }
}

/// # Safety
/// There are `rank` elements of `x`, and `N` chunks in each row of the matrix, whose rows are `stride`
/// elements apart, and as many outputs.
#[inline(always)]
unsafe fn up_lanes<T: Element, const N: usize>(
    x: *const f32,
    rank: usize,
    matrix: *const T,
    stride: usize,
    out: *mut f32,
) {
    let mut sums = [[0.0_f32; CHUNK]; N];
    // SAFETY: the caller upholds the contract.
    unsafe {
        for row in 0..rank {
            let x = *x.add(row);
            for (chunk, sums) in sums.iter_mut().enumerate() {
                let weights = matrix.add(row * stride + chunk * CHUNK);
                // Prefetches the same row of the next panel. Hardware prefetchers do not run ahead: panels are short,
                // and the panels of all adapters alternate.
                fetch(weights.wrapping_add(rank * stride).cast());
                let weights = weights.cast::<[T; CHUNK]>().read_unaligned();
                for j in 0..CHUNK {
                    sums[j] += x * weights[j].to_f32();
                }
            }
        }
        for (chunk, sums) in sums.iter().enumerate() {
            let out = out.add(chunk * CHUNK).cast::<[f32; CHUNK]>();
            let mut values = out.read_unaligned();
            for j in 0..CHUNK {
                values[j] += sums[j];
            }
            out.write_unaligned(values);
        }
    }
}

trait Element: Copy {
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}
