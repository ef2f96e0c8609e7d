//! Attention of a few rows that reads keys and values in their pages, by products of bf16 pairs.
//!
//! A decode row spends only a handful of instructions on a key, too few to pay for a copy. Each output is accumulated
//! in the same order as in `attention`, with the same bits. Only the number of sums computed at once differs, because
//! each instruction waits for the previous one of its sum, six cycles on Zen 4. Prefetches keep pace with reads.

use std::arch::x86_64::*;

use crate::kernels::{
    IN_PLACE_ROWS, InPlaceAttention, KEY_TILE, KeyTiles, LineQueue, PageValues, ROW_TILE_LEN,
    TILE_SOFTMAX_BLOCK, VALUE_TILE, tile_out_index, with_rows,
};

use super::tile_kv::widen;
use super::{load_pairs, spread_pair};

/// The kernels for bf16 pages.
pub const IN_PLACE: InPlaceAttention = InPlaceAttention {
    scores: scores::<false>,
    values: values::<false>,
};
/// The kernels for int8 pages.
pub const INT8_IN_PLACE: InPlaceAttention = InPlaceAttention {
    scores: scores::<true>,
    values: values::<true>,
};

/// # Safety
/// See `TileScores`.
unsafe fn scores<const INT8: bool>(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    const { assert!(IN_PLACE_ROWS == 8) };
    // SAFETY: the caller upholds the contract.
    unsafe {
        with_rows!(num_rows, M in [1 2 3 4 5 6 7 8],
            score_rows::<M, INT8>(q, q_stride, keys, out, lines));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn score_rows<const M: usize, const INT8: bool>(
    q: *const u16,
    q_stride: usize,
    keys: KeyTiles<'_>,
    mut out: *mut f32,
    lines: &mut LineQueue,
) {
    let mut tiles = keys.tiles;
    // SAFETY: the caller upholds the contract.
    unsafe {
        while !tiles.is_empty() {
            match tiles {
                [a, b, c, d, rest @ ..] if M <= 4 => {
                    let tiles_at_once = [*a, *b, *c, *d];
                    score_tiles::<M, 4, INT8>(q, q_stride, tiles_at_once, keys, out, lines);
                    (tiles, out) = (rest, out.add(4 * KEY_TILE));
                }
                [a, b, rest @ ..] => {
                    score_tiles::<M, 2, INT8>(q, q_stride, [*a, *b], keys, out, lines);
                    (tiles, out) = (rest, out.add(2 * KEY_TILE));
                }
                _ => unreachable!("the number of key tiles is odd"),
            }
        }
    }
}

/// Computes the scores of M queries for N tiles of keys.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn score_tiles<const M: usize, const N: usize, const INT8: bool>(
    q: *const u16,
    q_stride: usize,
    tiles: [*const u8; N],
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    // SAFETY: there are M rows of `head_dim` elements, and each tile has as many, an even number of pairs.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; M];
        for pair in (0..keys.head_dim / 2).step_by(2) {
            for _ in 0..N / 2 {
                lines.prefetch_some();
            }
            for (index, tile) in tiles.iter().enumerate() {
                let first = tile.add(pair * keys.stride);
                let keys = two_pairs::<INT8>(first, first.wrapping_add(keys.stride));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let q = q.byte_add(row * q_stride + pair * 4).cast::<u8>();
                    sums[index] = _mm512_dpbf16_ps(sums[index], spread_pair(q), keys[0]);
                    sums[index] = _mm512_dpbf16_ps(sums[index], spread_pair(q.add(4)), keys[1]);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (index, sums) in sums.iter().enumerate() {
                _mm512_storeu_ps(out.add(row * TILE_SOFTMAX_BLOCK + index * KEY_TILE), *sums);
            }
        }
    }
}

/// Loads 16 pairs from each address as bf16: 64 bytes, or 32 bytes of 8-bit integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn two_pairs<const INT8: bool>(first: *const u8, second: *const u8) -> [__m512bh; 2] {
    // SAFETY: the caller upholds the contract; both types are 64 bytes.
    unsafe {
        match INT8 {
            false => [load_pairs(first), load_pairs(second)],
            true => {
                let [first, second] = [first, second].map(|at| _mm256_loadu_si256(at.cast()));
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
                std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>(widen(both))
            }
        }
    }
}

/// # Safety
/// See `TileValuesInPlace`.
unsafe fn values<const INT8: bool>(
    weights: *const u16,
    num_rows: usize,
    values: PageValues<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        with_rows!(num_rows, M in [1 2 3 4 5 6 7 8],
            weigh_values::<M, INT8>(weights, values, out, lines));
    }
}

/// Adds weighted values to the outputs, for as many dimensions at once as there are registers for.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn weigh_values<const M: usize, const INT8: bool>(
    weights: *const u16,
    values: PageValues<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    let mut dim = 0;
    while dim < values.head_dim {
        // SAFETY: the caller upholds the contract, and this many dimensions are left, a multiple of 32.
        dim += unsafe {
            match values.head_dim - dim {
                128.. if M <= 2 => weigh_dims::<M, 8, INT8>(weights, values, dim, out, lines),
                64.. if M <= 4 => weigh_dims::<M, 4, INT8>(weights, values, dim, out, lines),
                _ => weigh_dims::<M, 2, INT8>(weights, values, dim, out, lines),
            }
        };
    }
}

/// Adds weighted values for M rows and N vectors of dimensions. Returns the number of these dimensions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn weigh_dims<const M: usize, const N: usize, const INT8: bool>(
    weights: *const u16,
    values: PageValues<'_>,
    dim: usize,
    out: *mut f32,
    lines: &mut LineQueue,
) -> usize {
    let pair_bytes = if INT8 { 2 } else { 4 };
    // SAFETY: the caller upholds the contract.
    unsafe {
        let out = out.add(tile_out_index(0, dim));
        let place = |row: usize, vector: usize| out.add(tile_out_index(row, vector * 16));
        let mut sums = [[_mm512_setzero_ps(); N]; M];
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sums) in sums.iter_mut().enumerate() {
                *sums = _mm512_loadu_ps(place(row, vector));
            }
        }
        for (index, tile) in values.tiles.iter().enumerate() {
            let tile = tile.add(dim * pair_bytes);
            let weights = weights.add(index / 2 * ROW_TILE_LEN + index % 2 * KEY_TILE);
            let num_positions = (values.num_positions - index * KEY_TILE).min(KEY_TILE);
            for pair in 0..num_positions.div_ceil(2) {
                if N > 2 || pair % 2 == 0 {
                    for _ in 0..N.div_ceil(4) {
                        lines.prefetch_some();
                    }
                }
                let pairs = tile.add(pair * values.head_dim * pair_bytes);
                let is_half = pair * 2 + 1 == num_positions;
                for vector in (0..N).step_by(2) {
                    let first = pairs.add(vector * 16 * pair_bytes);
                    let mut values = two_pairs::<INT8>(first, first.wrapping_add(16 * pair_bytes));
                    if is_half {
                        values = values.map(|values| without_second(values));
                    }
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let weight = weights.add(row * VALUE_TILE + pair * 2);
                        let weight = spread_pair(weight.cast());
                        sums[vector] = _mm512_dpbf16_ps(sums[vector], weight, values[0]);
                        sums[vector + 1] = _mm512_dpbf16_ps(sums[vector + 1], weight, values[1]);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (vector, sums) in sums.iter().enumerate() {
                _mm512_storeu_ps(place(row, vector), *sums);
            }
        }
    }
    16 * N
}

/// Clears the second element of each pair. Its weight is 0, but memory after the last position may hold NaN, and 0
/// times NaN is not 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn without_second(pairs: __m512bh) -> __m512bh {
    // SAFETY: all three types are 64 bytes.
    unsafe {
        let pairs = std::mem::transmute::<__m512bh, __m512i>(pairs);
        let first = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
        std::mem::transmute::<__m512i, __m512bh>(first)
    }
}
