//! Attention with bf16 keys and values through AMX tiles.
//!
//! As in dense layers, a tile instruction computes each of its rows separately: which rows share a tile does not affect
//! a result. Positions that a row must not attend to have weight 0, which adds nothing.

use std::arch::asm;
use std::ops::Range;

use crate::kernels::avx512_bf16::attention;
use crate::kernels::avx512_bf16::tile_softmax::softmax_row;
use crate::kernels::{
    KEY_TILE, KeyTiles, LineQueue, ROW_TILE_LEN, TILE_K, TILE_SOFTMAX_BLOCK, TileAttention,
    TileProduct, TileSoftmax, VALUE_TILE, ValueTiles,
};

use super::products::Products;
use super::tile::{apart, configure_full, release};

pub const TILE_ATTENTION: TileAttention = TileAttention {
    configure,
    scores,
    softmax,
    values,
    in_place: None,
    int8_in_place: None,
    release,
    ..attention::TILE_ATTENTION
};

/// Configures the tiles: sums are in tiles 0–3. More than 16 rows occupy two tiles, 4 and 5, which
/// are multiplied by two tiles of keys or values, 6 and 7. Up to 16 rows occupy tile 4, which is
/// multiplied by four tiles in turn: 5, 6, 7 and 5 again.
///
/// # Safety
/// The process must have permission to use tiles.
unsafe fn configure(num_rows: usize) {
    let (low, high) = (num_rows.min(16), num_rows.saturating_sub(16));
    let rows = match high {
        0 => [low, low, low, low, low, 16, 16, 16],
        _ => [low, low, high, high, low, high, 16, 16],
    };
    // SAFETY: the caller upholds the contract.
    unsafe { configure_full(rows) };
}

/// The length of a row of a tile, in bytes.
const LINE: usize = 64;
const ROW_TILE_BYTES: usize = ROW_TILE_LEN * 2;
const SCORE_ROW_BYTES: usize = TILE_SOFTMAX_BLOCK * 4;

/// Loads a tile. Single tile instructions are safe here because nothing else uses tiles between them.
macro_rules! load {
    ($tile:tt, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd ", $tile, ", [{from} + {stride}]"),
            from = in(reg) $from, stride = in(reg) $stride, out($tile) _,
            options(nostack, readonly),
        )
    };
}

macro_rules! store {
    ($tile:tt, $to:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{to} + {stride}], ", $tile),
            to = in(reg) $to, stride = in(reg) $stride,
            options(nostack),
        )
    };
}

/// Loads a tile and adds its product with tile 4 to the sums, with prefetches in between.
macro_rules! multiply {
    ($sums:tt, $tile:tt, $from:expr, $stride:expr, $lines:ident) => {
        load!($tile, $from, $stride);
        $lines.prefetch_some();
        asm!(
            concat!("tdpbf16ps ", $sums, ", tmm4, ", $tile),
            out($sums) _,
            options(nostack, nomem),
        );
        $lines.prefetch_some();
    };
}

/// # Safety
/// Tiles 0–3 must be configured.
#[inline(always)]
unsafe fn zero() {
    // SAFETY: this uses tiles only.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, nomem),
        );
    }
}

/// # Safety
/// See `TileScores`.
// Long: one block of assembly for each shape of tiles.
unsafe fn scores(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    let KeyTiles {
        tiles: mut keys,
        stride,
        head_dim,
    } = keys;
    debug_assert!(head_dim.is_multiple_of(TILE_K) && head_dim > 0);
    debug_assert!(keys.len().is_multiple_of(2) && keys.len() * KEY_TILE <= TILE_SOFTMAX_BLOCK);
    let num_blocks = head_dim / TILE_K;
    let key_bytes = 16 * stride;
    let mut out = out;
    // SAFETY: this reads `num_rows` queries, and of each tile of keys `head_dim / 2` rows of 64
    // bytes. It writes `num_rows` rows of 16 scores for each tile of keys.
    unsafe {
        while let [k0, k1, rest @ ..] = keys {
            if num_rows > 16 {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    apart!("tileloadd tmm4, [{q} + {q_stride}]"),
                    apart!("tileloadd tmm6, [{k0} + {stride}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm6"),
                    apart!("tileloadd tmm5, [{below} + {q_stride}]"),
                    apart!("tdpbf16ps tmm2, tmm5, tmm6"),
                    apart!("tileloadd tmm7, [{k1} + {stride}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm7"),
                    apart!("tdpbf16ps tmm3, tmm5, tmm7"),
                    "add {q}, {block_bytes}", "add {below}, {block_bytes}",
                    "add {k0}, {key_bytes}", "add {k1}, {key_bytes}",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {out_bytes}], tmm0",
                    "tilestored [{out} + {out_bytes} + {low}], tmm2",
                    "tilestored [{out} + {out_bytes} + 64], tmm1",
                    "tilestored [{out} + {out_bytes} + {low} + 64], tmm3",
                    q = inout(reg) q => _, below = inout(reg) q.wrapping_byte_add(16 * q_stride) => _,
                    k0 = inout(reg) *k0 => _, k1 = inout(reg) *k1 => _,
                    n = inout(reg) num_blocks => _,
                    q_stride = in(reg) q_stride, stride = in(reg) stride,
                    block_bytes = const TILE_K * 2, key_bytes = in(reg) key_bytes,
                    out = in(reg) out, out_bytes = in(reg) SCORE_ROW_BYTES,
                    low = const 16 * SCORE_ROW_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
                (keys, out) = (rest, out.add(2 * KEY_TILE));
            } else if let [k2, k3, rest @ ..] = rest {
                zero();
                for block in 0..num_blocks {
                    let key = |key: &*const u8| key.wrapping_add(block * key_bytes);
                    load!("tmm4", q.wrapping_add(block * TILE_K), q_stride);
                    lines.prefetch_some();
                    multiply!("tmm0", "tmm5", key(k0), stride, lines);
                    multiply!("tmm1", "tmm6", key(k1), stride, lines);
                    multiply!("tmm2", "tmm7", key(k2), stride, lines);
                    multiply!("tmm3", "tmm5", key(k3), stride, lines);
                }
                store!("tmm0", out, SCORE_ROW_BYTES);
                store!("tmm1", out.add(KEY_TILE), SCORE_ROW_BYTES);
                store!("tmm2", out.add(2 * KEY_TILE), SCORE_ROW_BYTES);
                store!("tmm3", out.add(3 * KEY_TILE), SCORE_ROW_BYTES);
                (keys, out) = (rest, out.add(4 * KEY_TILE));
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "2:",
                    apart!("tileloadd tmm4, [{q} + {q_stride}]"),
                    apart!("tileloadd tmm5, [{k0} + {stride}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm5"),
                    apart!("tileloadd tmm6, [{k1} + {stride}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm6"),
                    "add {q}, {block_bytes}", "add {k0}, {key_bytes}", "add {k1}, {key_bytes}",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {out_bytes}], tmm0",
                    "tilestored [{out} + {out_bytes} + 64], tmm1",
                    q = inout(reg) q => _, k0 = inout(reg) *k0 => _, k1 = inout(reg) *k1 => _,
                    n = inout(reg) num_blocks => _,
                    q_stride = in(reg) q_stride, stride = in(reg) stride,
                    block_bytes = const TILE_K * 2, key_bytes = in(reg) key_bytes,
                    out = in(reg) out, out_bytes = in(reg) SCORE_ROW_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack),
                );
                (keys, out) = (rest, out.add(2 * KEY_TILE));
            }
        }
    }
}

/// # Safety
/// See [`TileSoftmax`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn softmax(mut block: TileSoftmax<'_>, products: &[TileProduct]) {
    let num_rows = block.ends.len();
    let steps_of_row = Products::num_steps(products).div_ceil(num_rows);
    let mut products = Products::new(products);
    for row in 0..num_rows {
        // SAFETY: the caller upholds the contract.
        unsafe {
            for _ in 0..steps_of_row {
                products.step();
            }
            softmax_row(&mut block, row);
        }
    }
    // SAFETY: the caller upholds the contract.
    unsafe { products.finish() };
}

/// # Safety
/// See `TileValues`.
// Long: one block of assembly for each shape of tiles.
unsafe fn values(
    weights: *const u16,
    num_rows: usize,
    values: ValueTiles,
    dims: Range<usize>,
    out: *mut f32,
    lines: &mut LineQueue,
) {
    let ValueTiles {
        first: values,
        num_tiles,
        head_dim,
    } = values;
    debug_assert!(head_dim.is_multiple_of(32) && num_tiles > 0);
    /// The size of a tile, in bytes.
    const TILE: usize = 1024;
    let step = head_dim * VALUE_TILE * 2;
    let mut dim = dims.start;
    // SAFETY: `weights` has `num_rows` rows in each of its tiles; `values` and `out` have `head_dim` dimensions.
    unsafe {
        while dim < dims.end {
            let (v, out) = (values.add(dim * VALUE_TILE), out.add(dim * 32));
            if num_rows > 16 {
                asm!(
                    "tileloadd tmm0, [{out} + {line}]",
                    "tileloadd tmm2, [{out} + {line} + {tile}]",
                    "tileloadd tmm1, [{out} + {line} + 2*{tile}]",
                    "tileloadd tmm3, [{out} + {line} + 3*{tile}]",
                    "2:",
                    apart!("tileloadd tmm4, [{w} + {line}]"),
                    apart!("tileloadd tmm6, [{v} + {line}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm6"),
                    apart!("tileloadd tmm5, [{w} + {line} + {tile}]"),
                    apart!("tdpbf16ps tmm2, tmm5, tmm6"),
                    apart!("tileloadd tmm7, [{v} + {line} + {tile}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm7"),
                    apart!("tdpbf16ps tmm3, tmm5, tmm7"),
                    "add {v}, {step}", "add {w}, {row_tile}", "dec {n}", "jnz 2b",
                    "tilestored [{out} + {line}], tmm0",
                    "tilestored [{out} + {line} + {tile}], tmm2",
                    "tilestored [{out} + {line} + 2*{tile}], tmm1",
                    "tilestored [{out} + {line} + 3*{tile}], tmm3",
                    out = in(reg) out, v = inout(reg) v => _, w = inout(reg) weights => _,
                    n = inout(reg) num_tiles => _, line = in(reg) LINE, step = in(reg) step,
                    tile = const TILE, row_tile = const ROW_TILE_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
                dim += 32;
            } else if dims.end - dim >= 64 {
                load!("tmm0", out, LINE);
                load!("tmm1", out.add(2 * TILE / 4), LINE);
                load!("tmm2", out.add(4 * TILE / 4), LINE);
                load!("tmm3", out.add(6 * TILE / 4), LINE);
                for tile in 0..num_tiles {
                    let v = v.cast::<u8>().add(tile * step);
                    load!("tmm4", weights.add(tile * ROW_TILE_LEN), LINE);
                    lines.prefetch_some();
                    multiply!("tmm0", "tmm5", v, LINE, lines);
                    multiply!("tmm1", "tmm6", v.add(TILE), LINE, lines);
                    multiply!("tmm2", "tmm7", v.add(2 * TILE), LINE, lines);
                    multiply!("tmm3", "tmm5", v.add(3 * TILE), LINE, lines);
                }
                store!("tmm0", out, LINE);
                store!("tmm1", out.add(2 * TILE / 4), LINE);
                store!("tmm2", out.add(4 * TILE / 4), LINE);
                store!("tmm3", out.add(6 * TILE / 4), LINE);
                dim += 64;
            } else {
                asm!(
                    "tileloadd tmm0, [{out} + {line}]",
                    "tileloadd tmm1, [{out} + {line} + 2*{tile}]",
                    "2:",
                    apart!("tileloadd tmm4, [{w} + {line}]"),
                    apart!("tileloadd tmm5, [{v} + {line}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm5"),
                    apart!("tileloadd tmm6, [{v} + {line} + {tile}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm6"),
                    "add {v}, {step}", "add {w}, {row_tile}", "dec {n}", "jnz 2b",
                    "tilestored [{out} + {line}], tmm0",
                    "tilestored [{out} + {line} + 2*{tile}], tmm1",
                    out = in(reg) out, v = inout(reg) v => _, w = inout(reg) weights => _,
                    n = inout(reg) num_tiles => _, line = in(reg) LINE, step = in(reg) step,
                    tile = const TILE, row_tile = const ROW_TILE_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(nostack),
                );
                dim += 32;
            }
        }
    }
}
