//! GEMM with group-wise scaled weights in AVX2.
//!
//! 4-bit weights are multiplied as unsigned values of at most 15: 16 bits hold the sum of a whole chunk of 32 products,
//! or of half a chunk with FP4 levels. 8-bit weights are multiplied by magnitude, and 16 bits hold only two products.

use std::arch::x86_64::*;

use crate::kernels::grouped::{
    GroupedShape, GroupedTile, LANE_F16_BYTES, RAISED_LEVELS, SummedRows, middle,
};
use crate::kernels::{INT8_TILE_K, PANEL_LANES, line_ahead, with_rows};

/// The largest number of rows whose sums stay in registers.
const MAX_ROWS: usize = 3;

/// # Safety
/// See `GroupedGemm`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn gemm(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
) {
    for (index, GroupedTile { rows, out }) in tiles.iter().enumerate() {
        // SAFETY: the caller upholds the contract.
        unsafe { gemm_tile(rows, panel, shape, fetch_ahead && index == 0, *out) };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemm_tile(
    rows: &SummedRows,
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    let num_parts = rows.num_rows.div_ceil(MAX_ROWS);
    for part in 0..num_parts {
        let first = part * rows.num_rows / num_parts;
        let end = (part + 1) * rows.num_rows / num_parts;
        let fetch_ahead = fetch_ahead && part == 0;
        // SAFETY: the caller upholds the contract.
        unsafe {
            let out = out.add(first * PANEL_LANES);
            with_rows!(end - first, M in [1 2 3], match (shape.bits, shape.is_fp4) {
                (4, false) => gemm_rows::<M, 4, false>(rows, first, panel, shape, fetch_ahead, out),
                (4, true) => gemm_rows::<M, 4, true>(rows, first, panel, shape, fetch_ahead, out),
                _ => gemm_rows::<M, 8, false>(rows, first, panel, shape, fetch_ahead, out),
            });
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemm_rows<const M: usize, const BITS: usize, const IS_FP4: bool>(
    rows: &SummedRows,
    first: usize,
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    // SAFETY: the groups belong to the panel, and the rows have their chunks. `out` has M rows of
    // 32. Prefetches may name any address.
    unsafe {
        // Each of the four quarters has 8 lanes.
        let mut acc = [[_mm256_setzero_ps(); 4]; M];
        for group in 0..shape.num_groups() {
            let head = panel.add(group * shape.group_bytes());
            let chunks = shape.chunks(group);
            let lines = head.add(shape.head_bytes());
            if fetch_ahead {
                let num_lines = (shape.head_bytes() + chunks.len() * shape.chunk_bytes()) / 64;
                for line in 0..num_lines {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(head.add(line * 64)).cast());
                }
            }
            let mut row_sums = [0; M];
            for chunk in chunks.clone() {
                for r in 0..M {
                    row_sums[r] += *rows.sums(chunk, first + r);
                }
            }
            for q in 0..4 {
                let mut sums = [_mm256_setzero_si256(); M];
                for (i, chunk) in chunks.clone().enumerate() {
                    let x = rows.chunk(chunk, first);
                    let lines = lines.add(i * shape.chunk_bytes() + q * 32);
                    let products = match (BITS, IS_FP4) {
                        (4, false) => products_of_halves::<M>(x, lines),
                        (4, true) => products_of_levels::<M>(x, lines),
                        _ => products_of_bytes::<M>(x, lines),
                    };
                    for r in 0..M {
                        sums[r] = _mm256_add_epi32(sums[r], products[r]);
                    }
                }
                let scale = load_f16(head.add(q * 16));
                for r in 0..M {
                    let mut sum = sums[r];
                    if BITS == 4 && !shape.has_minimum {
                        let start = _mm256_set1_epi32(middle(BITS, IS_FP4) * row_sums[r]);
                        sum = _mm256_sub_epi32(sum, start);
                    }
                    acc[r][q] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[r][q]);
                    if shape.has_minimum {
                        let minimum = load_f16(head.add(LANE_F16_BYTES + q * 16));
                        let row_sum = _mm256_set1_ps(row_sums[r] as f32);
                        acc[r][q] = _mm256_fmadd_ps(row_sum, minimum, acc[r][q]);
                    }
                }
            }
        }
        for r in 0..M {
            for q in 0..4 {
                _mm256_storeu_ps(out.add(r * PANEL_LANES + q * 8), acc[r][q]);
            }
        }
    }
}

/// Products of a chunk's 4-bit weights for 8 lanes. The lanes' bytes of the chunk's four pairs of
/// quads are 128 bytes apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products_of_halves<const M: usize>(x: *const i8, lines: *const u8) -> [__m256i; M] {
    let (low_half, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut pairs = [_mm256_setzero_si256(); M];
    for p in 0..4 {
        // SAFETY: the address is inside the chunk, of the weights and of each row.
        unsafe {
            let bytes = _mm256_loadu_si256(lines.add(p * 128).cast());
            let low = _mm256_and_si256(bytes, low_half);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_half);
            for r in 0..M {
                let x = x.add(r * INT8_TILE_K + p * 8).cast::<i32>();
                let first = _mm256_set1_epi32(x.read_unaligned());
                let second = _mm256_set1_epi32(x.add(1).read_unaligned());
                let first = _mm256_maddubs_epi16(low, first);
                let second = _mm256_maddubs_epi16(high, second);
                pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(first, second));
            }
        }
    }
    pairs.map(|pairs| _mm256_madd_epi16(pairs, ones))
}

/// `products_of_halves` for the indices of FP4 levels.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products_of_levels<const M: usize>(x: *const i8, lines: *const u8) -> [__m256i; M] {
    let (low_half, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [_mm256_setzero_si256(); M];
    // SAFETY: there are 16 levels. The addresses are inside the chunk, of the weights and of each row.
    unsafe {
        let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(RAISED_LEVELS.as_ptr().cast()));
        for half in 0..2 {
            let mut pairs = [_mm256_setzero_si256(); M];
            for p in 2 * half..2 * half + 2 {
                let bytes = _mm256_loadu_si256(lines.add(p * 128).cast());
                let low = _mm256_and_si256(bytes, low_half);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_half);
                let low = _mm256_shuffle_epi8(levels, low);
                let high = _mm256_shuffle_epi8(levels, high);
                for r in 0..M {
                    let x = x.add(r * INT8_TILE_K + p * 8).cast::<i32>();
                    let first = _mm256_set1_epi32(x.read_unaligned());
                    let second = _mm256_set1_epi32(x.add(1).read_unaligned());
                    let first = _mm256_maddubs_epi16(low, first);
                    let second = _mm256_maddubs_epi16(high, second);
                    pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(first, second));
                }
            }
            for r in 0..M {
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs[r], ones));
            }
        }
    }
    sums
}

/// Products of a chunk's 8-bit weights for 8 lanes. The lanes' bytes of the chunk's eight quads are 128 bytes apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products_of_bytes<const M: usize>(x: *const i8, lines: *const u8) -> [__m256i; M] {
    let (middle, ones) = (_mm256_set1_epi8(i8::MIN), _mm256_set1_epi16(1));
    let mut sums = [_mm256_setzero_si256(); M];
    for q in 0..8 {
        // SAFETY: the address is inside the chunk, of the weights and of each row.
        unsafe {
            let w = _mm256_xor_si256(_mm256_loadu_si256(lines.add(q * 128).cast()), middle);
            let magnitude = _mm256_abs_epi8(w);
            for r in 0..M {
                let x = x.add(r * INT8_TILE_K + q * 4).cast::<i32>();
                let x = _mm256_sign_epi8(_mm256_set1_epi32(x.read_unaligned()), w);
                let pairs = _mm256_maddubs_epi16(magnitude, x);
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    sums
}

/// Loads 8 consecutive f16 values as f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_f16(at: *const u8) -> __m256 {
    // SAFETY: the caller promises 8 values.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}
