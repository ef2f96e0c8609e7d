//! Attention with bf16 keys and values by products of pairs: vector loops that do what matrix tiles do.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::{
    KeyTiles, LineQueue, QUERY_TILE_ROWS, ROW_TILE_LEN, TILE_K, TILE_SOFTMAX_BLOCK, TileAttention,
    TileProduct, TileSoftmax, VALUE_TILE, ValueTiles, with_rows,
};

use super::in_place_attention::{IN_PLACE, INT8_IN_PLACE};
use super::tile_kv::{
    copy_values, norm_rotate_rounded, store_keys, store_values, widen_keys, widen_values,
};
use super::tile_softmax::{softmax_row, store_rounded, store_row};
use super::{load_pairs, spread_pair};

pub const TILE_ATTENTION: TileAttention = TileAttention {
    configure: |_| (),
    norm_rotate_rounded,
    store_keys,
    store_values,
    scores,
    softmax,
    copy_values,
    widen_values,
    widen_keys,
    values,
    in_place: Some(IN_PLACE),
    int8_in_place: Some(INT8_IN_PLACE),
    store_row,
    store_rounded,
    release: || (),
};

/// # Safety
/// See `TileScores`.
unsafe fn scores(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    const ROW_BYTES: usize = TILE_SOFTMAX_BLOCK * 4;
    let (pairs, []) = keys.tiles.as_chunks::<2>() else {
        unreachable!("{} key tiles, but they come in pairs", keys.tiles.len());
    };
    for (index, pair) in pairs.iter().enumerate() {
        let product = TileProduct {
            a: q.cast(),
            a_stride: q_stride,
            a_step: TILE_K * 2,
            b: *pair,
            b_stride: keys.stride,
            b_step: TILE_K / 2 * keys.stride,
            num_blocks: keys.head_dim / TILE_K,
            out: out.wrapping_add(index * 32),
            out_stride: ROW_BYTES,
            right: 64,
            below: 16 * ROW_BYTES,
            adds: false,
        };
        // SAFETY: the caller upholds the contract.
        unsafe { multiply(&product, num_rows, lines) };
    }
}

/// # Safety
/// See `TileValues`.
unsafe fn values(
    weights: *const u16,
    num_rows: usize,
    values: ValueTiles,
    dims: Range<usize>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    /// The size of a tile of 16 rows or positions and 16 dimensions.
    const TILE_BYTES: usize = 16 * 64;
    for dim in dims.step_by(32) {
        let first = values.first.wrapping_add(dim * VALUE_TILE).cast::<u8>();
        let product = TileProduct {
            a: weights.cast(),
            a_stride: VALUE_TILE * 2,
            a_step: ROW_TILE_LEN * 2,
            b: [first, first.wrapping_add(TILE_BYTES)],
            b_stride: 64,
            b_step: values.head_dim * VALUE_TILE * 2,
            num_blocks: values.num_tiles,
            out: out.wrapping_add(dim * QUERY_TILE_ROWS),
            out_stride: 64,
            right: 2 * TILE_BYTES,
            below: TILE_BYTES,
            adds: true,
        };
        // SAFETY: the caller upholds the contract.
        unsafe { multiply(&product, num_rows, lines) };
    }
}

/// Computes the softmax and then the products: both need the vector units.
///
/// # Safety
/// See [`TileSoftmax`] and [`TileProduct`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn softmax(mut block: TileSoftmax<'_>, products: &[TileProduct]) {
    let num_rows = block.ends.len();
    // SAFETY: the caller upholds the contract.
    unsafe {
        for row in 0..num_rows {
            softmax_row(&mut block, row);
        }
        for product in products {
            multiply(product, num_rows, &mut LineQueue::new(1));
        }
    }
}

/// The largest number of rows whose sums stay in registers. It divides 16, the number of rows in half a tile.
const ROWS: usize = 8;

/// # Safety
/// See [`TileProduct`]; here any number of rows is allowed.
unsafe fn multiply(product: &TileProduct, num_rows: usize, lines: &mut LineQueue) {
    for first in (0..num_rows).step_by(ROWS) {
        let mut block = *product;
        block.a = product.a.wrapping_add(first * product.a_stride);
        let row = first % 16 * product.out_stride + first / 16 * product.below;
        block.out = product.out.wrapping_byte_add(row);
        let num_rows = ROWS.min(num_rows - first);
        // SAFETY: the caller upholds the contract, and these rows are in one half of the tile.
        unsafe {
            with_rows!(num_rows, M in [1 2 3 4 5 6 7 8], multiply_rows::<M>(&block, lines));
        }
    }
}

/// # Safety
/// See [`TileProduct`]; there are M rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_rows<const M: usize>(product: &TileProduct, lines: &mut LineQueue) {
    // SAFETY: there are M rows of `num_blocks` blocks of `TILE_K` elements, as many pairs of 32
    // columns, and sums for both.
    unsafe {
        let place = |row: usize, half: usize| {
            let at = row * product.out_stride + half * product.right;
            product.out.byte_add(at)
        };
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        if product.adds {
            for (row, sums) in sums.iter_mut().enumerate() {
                *sums = [0, 1].map(|half| _mm512_loadu_ps(place(row, half)));
            }
        }
        for block in 0..product.num_blocks {
            let a = product.a.add(block * product.a_step);
            let b = product.b.map(|b| b.add(block * product.b_step));
            for pair in 0..TILE_K / 2 {
                if pair % 4 == 0 {
                    lines.prefetch_some();
                }
                let b = b.map(|b| load_pairs(b.add(pair * product.b_stride)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let a = spread_pair(a.add(row * product.a_stride + pair * 4));
                    sums[0] = _mm512_dpbf16_ps(sums[0], a, b[0]);
                    sums[1] = _mm512_dpbf16_ps(sums[1], a, b[1]);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            _mm512_storeu_ps(place(row, 0), sums[0]);
            _mm512_storeu_ps(place(row, 1), sums[1]);
        }
    }
}
