//! Attention over bf16 keys and values through AMX matrix tiles.
//!
//! As in dense layers, a tile instruction works on each of its rows by itself: which rows share a
//! tile reaches no result. Weights of positions that a row may not see are 0 and add nothing.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::amx::{apart, configure_full, release};
use super::amx_kv::{norm_rotate_rounded, store_keys, store_values};
use super::amx_products::Products;
use super::avx512::first_lanes;
use super::{
    KEY_TILE, KeyTiles, LineQueue, ROW_TILE_LEN, RowSums, TILE_ATTENTION_BLOCK, TILE_K,
    TILE_SOFTMAX_BLOCK, TileAttention, TileProduct, TileSoftmax, VALUE_TILE, ValueTiles,
    tile_out_index,
};

pub const TILE_ATTENTION: TileAttention = TileAttention {
    configure,
    norm_rotate_rounded,
    store_keys,
    store_values,
    scores,
    softmax,
    copy_values,
    widen_values,
    widen_keys,
    values,
    store_row,
    store_rounded,
    release,
};

/// Sums in tiles 0–3. More than 16 rows have two tiles, 4 and 5, against two of keys or values, 6 and
/// 7; up to 16 rows have one, 4, against four in 5, 6, 7 and 5 again.
///
/// # Safety
/// The process may use tiles.
unsafe fn configure(num_rows: usize) {
    let (low, high) = (num_rows.min(16), num_rows.saturating_sub(16));
    let rows = match high {
        0 => [low, low, low, low, low, 16, 16, 16],
        _ => [low, low, high, high, low, high, 16, 16],
    };
    // SAFETY: the caller's promise, passed on.
    unsafe { configure_full(rows) };
}

/// Bytes of a row of a tile.
const LINE: usize = 64;
const ROW_TILE_BYTES: usize = ROW_TILE_LEN * 2;
const SCORE_ROW_BYTES: usize = TILE_SOFTMAX_BLOCK * 4;

/// Instructions for tiles one by one: nothing else touches tiles between them.
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

/// Adds tile 4 times what is loaded.
macro_rules! multiply {
    ($sums:tt, $tile:tt, $from:expr, $stride:expr, $lines:ident) => {
        load!($tile, $from, $stride);
        $lines.ask_some();
        asm!(
            concat!("tdpbf16ps ", $sums, ", tmm4, ", $tile),
            out($sums) _,
            options(nostack, nomem),
        );
        $lines.ask_some();
    };
}

/// # Safety
/// Tiles 0–3 are configured.
#[inline(always)]
unsafe fn zero() {
    // SAFETY: touches tiles only.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, nomem),
        );
    }
}

/// # Safety
/// See [`super::TileScores`].
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
    // SAFETY: reads `num_rows` queries and, of each group, `head_dim / 2` rows of 64 bytes; writes
    // `num_rows` rows of 16 scores for each group.
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
                    lines.ask_some();
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

const VECTORS: usize = TILE_SOFTMAX_BLOCK / 16;
/// What a score may exceed its row's reference by, in powers of 2.
const HEADROOM: f32 = 16.0;

/// # Safety
/// See [`TileSoftmax`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub unsafe fn softmax(mut block: TileSoftmax<'_>, products: &[TileProduct]) {
    let factor = _mm512_set1_ps(block.scale * std::f32::consts::LOG2_E);
    let (ends, all) = (block.ends, block.start + TILE_SOFTMAX_BLOCK);
    let steps_of_row = Products::num_steps(products).div_ceil(ends.len());
    let mut products = Products::new(products);
    for (row, &end) in ends.iter().enumerate() {
        // SAFETY: `scores` has a row of `TILE_SOFTMAX_BLOCK` elements, `weights` tiles for as many.
        unsafe {
            for _ in 0..steps_of_row {
                products.step();
            }
            let scores = block.scores.add(row * TILE_SOFTMAX_BLOCK);
            if end >= all {
                let s = std::array::from_fn(|v| _mm512_loadu_ps(scores.add(v * 16)));
                softmax_row(&mut block, row, s, factor, [0xffff; VECTORS]);
            } else if end > block.start {
                let num_seen = end - block.start;
                let masks = std::array::from_fn(|v| first_lanes(num_seen.saturating_sub(v * 16)));
                let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
                let s = std::array::from_fn(|v| {
                    _mm512_mask_loadu_ps(lowest, masks[v], scores.add(v * 16))
                });
                softmax_row(&mut block, row, s, factor, masks);
            } else {
                for tile in 0..VECTORS / 2 {
                    _mm512_storeu_si512(weight_row(&block, row, tile), _mm512_setzero_si512());
                }
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { products.finish() };
}

/// Tiles of weights of the same block before these.
fn first_tile(block: &TileSoftmax<'_>) -> usize {
    block.start % TILE_ATTENTION_BLOCK / VALUE_TILE
}

/// 32 weights of a row.
#[inline(always)]
fn weight_row(block: &TileSoftmax<'_>, row: usize, tile: usize) -> *mut __m512i {
    let at = (first_tile(block) + tile) * ROW_TILE_LEN + row * VALUE_TILE;
    block.weights.wrapping_add(at).cast()
}

/// In powers of two, so that no range needs a check: too small ones are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn softmax_row(
    block: &mut TileSoftmax<'_>,
    row: usize,
    s: [__m512; VECTORS],
    factor: __m512,
    masks: [__mmask16; VECTORS],
) {
    let s = match block.scales {
        None => s,
        // SAFETY: `TILE_SOFTMAX_BLOCK` scales, of which those that are masked may be anything.
        Some([keys, _]) => unsafe {
            std::array::from_fn(|v| {
                let scales = _mm512_loadu_ps(keys.add(v * 16));
                let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
                _mm512_mask_mul_ps(lowest, masks[v], s[v], scales)
            })
        },
    };
    let max = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
    let max = _mm512_mul_ps(max, factor);
    let limit = _mm512_set1_ps(block.rows[row].reference + HEADROOM);
    // SAFETY: weights and sums of the row.
    unsafe {
        if _mm512_cmp_ps_mask::<_CMP_GT_OQ>(max, limit) != 0 {
            raise(block, row, _mm512_reduce_max_ps(max).ceil());
        }
        let reference = _mm512_set1_ps(block.rows[row].reference);
        let weight = |v: usize| {
            let x = _mm512_fmsub_ps(s[v], factor, reference);
            _mm512_maskz_mov_ps(masks[v], exp2_lanes(x))
        };
        let w = [weight(0), weight(1), weight(2), weight(3)];
        let added = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
        let sums = block.rows[row].sums.as_mut_ptr();
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), added));
        let w = match block.scales {
            None => w,
            Some([_, values]) => std::array::from_fn(|v| {
                let scales = _mm512_loadu_ps(values.add(v * 16));
                _mm512_maskz_mul_ps(masks[v], w[v], scales)
            }),
        };
        for tile in 0..VECTORS / 2 {
            let rounded: __m512i =
                std::mem::transmute(_mm512_cvtne2ps_pbh(w[2 * tile + 1], w[2 * tile]));
            _mm512_storeu_si512(weight_row(block, row, tile), rounded);
        }
    }
}

/// Shrinks what a row has accumulated, and the weights of this block that are still to be used.
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn raise(block: &mut TileSoftmax<'_>, row: usize, reference: f32) {
    let sums = &mut block.rows[row];
    if sums.reference == f32::NEG_INFINITY {
        sums.reference = reference;
        return;
    }
    let difference = _mm512_set1_ps(sums.reference - reference);
    // Of whole numbers: exact, and the same for weights as for what they have been used for. Beyond
    // that range nothing is left.
    let kept = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(difference, _mm512_set1_ps(-100.0));
    let shrink = _mm512_maskz_scalef_ps(kept, _mm512_set1_ps(1.0), difference);
    sums.reference = reference;
    // SAFETY: the row's sums, output, and weights.
    unsafe {
        let scale = |at: *mut f32| {
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), shrink));
        };
        scale(sums.sums.as_mut_ptr());
        for i in (0..block.head_dim).step_by(16) {
            scale(block.out.add(tile_out_index(row, i)));
        }
        for tile in 0..first_tile(block) {
            let at = block.weights.add(tile * ROW_TILE_LEN + row * VALUE_TILE);
            for half in [at, at.add(16)] {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(half.cast()));
                let weights = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide));
                let rounded = _mm512_cvtneps_pbh(_mm512_mul_ps(weights, shrink));
                _mm256_storeu_si256(
                    half.cast(),
                    std::mem::transmute::<__m256bh, __m256i>(rounded),
                );
            }
        }
    }
}

/// 2ˣ: 2ⁿ · p(x - n), n = ⌊x⌋. p is the polynomial of degree 3 with the smallest relative error,
/// 8e-5 on that interval, far below the half percent of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub fn exp2_lanes(x: __m512) -> __m512 {
    const COEFFICIENTS: [f32; 4] = [0.078_024_52, 0.226_067_16, 0.695_833_56, 0.999_925_2];
    let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
    let mut p = _mm512_set1_ps(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    // Rounds x down too.
    _mm512_scalef_ps(p, x)
}

/// # Safety
/// See [`TileAttention::store_row`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn store_row(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut f32) {
    let scale = row_scale(sums);
    for i in (0..head_dim).step_by(16) {
        // SAFETY: `head_dim` dimensions each.
        unsafe { _mm512_storeu_ps(to.add(i), scaled(out, i, scale)) };
    }
}

/// # Safety
/// See [`TileAttention::store_rounded`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub unsafe fn store_rounded(
    out: *const f32,
    sums: &RowSums,
    head_dim: usize,
    to: *mut u16,
    stride: usize,
) {
    let scale = row_scale(sums);
    for block in 0..head_dim / TILE_K {
        let i = block * TILE_K;
        // SAFETY: `head_dim` dimensions; a line of each block.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(scaled(out, i + 16, scale), scaled(out, i, scale));
            let rounded = std::mem::transmute::<__m512bh, __m512i>(rounded);
            _mm512_storeu_si512(to.add(block * stride).cast(), rounded);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn row_scale(sums: &RowSums) -> __m512 {
    // SAFETY: 16 sums.
    let sum = _mm512_reduce_add_ps(unsafe { _mm512_load_ps(sums.sums.as_ptr()) });
    _mm512_set1_ps(1.0 / sum)
}

/// 16 dimensions of a row, from `i` on. Adding 0 makes 0 of -0.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scaled(out: *const f32, i: usize, scale: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    let values = unsafe { _mm512_loadu_ps(out.add(tile_out_index(0, i))) };
    _mm512_fmadd_ps(values, scale, _mm512_setzero_ps())
}

/// # Safety
/// See [`TileAttention::copy_values`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn copy_values(
    from: *const u8,
    num_positions: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(16) {
            if i % 32 == 0 {
                lines.ask_some();
            }
            // SAFETY: rows of `head_dim` pairs; what is masked is not read.
            unsafe {
                let row = from.cast::<i16>().add((pair * head_dim + i) * 2);
                let elements = _mm512_maskz_loadu_epi16(mask, row);
                _mm512_storeu_si512(to.add(i * VALUE_TILE + pair * 32).cast(), elements);
            }
        }
    }
}

/// # Safety
/// See [`TileAttention::widen_values`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub unsafe fn widen_values(
    from: *const u8,
    num_positions: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555_5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(32) {
            if i % 64 == 0 {
                lines.ask_some();
            }
            // SAFETY: rows of `head_dim` pairs, a multiple of 32; what is masked is not read.
            unsafe {
                let row = from.cast::<i8>().add((pair * head_dim + i) * 2);
                let wide = widen(_mm512_maskz_loadu_epi8(mask, row));
                for (half, wide) in wide.into_iter().enumerate() {
                    let to = to.add((i + half * 16) * VALUE_TILE + pair * 32);
                    _mm512_storeu_si512(to.cast(), wide);
                }
            }
        }
    }
}

/// # Safety
/// See [`TileAttention::widen_keys`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub unsafe fn widen_keys(
    from: *const u8,
    stride: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in (0..head_dim / 2).step_by(2) {
        if pair % 4 == 0 {
            lines.ask_some();
        }
        // SAFETY: 16 positions of a pair of dimensions each, of which there is an even number.
        unsafe {
            let row = |pair: usize| _mm256_loadu_si256(from.add(pair * stride).cast());
            let rows = _mm512_castsi256_si512(row(pair));
            let wide = widen(_mm512_inserti64x4::<1>(rows, row(pair + 1)));
            for (half, wide) in wide.into_iter().enumerate() {
                _mm512_storeu_si512(to.add((pair + half) * 32).cast(), wide);
            }
        }
    }
}

/// Of bf16, which has 8 bits of precision: enough for what is at most 127.
const LOW_BYTES: [u8; 128] = bytes_of_bf16(0);
const HIGH_BYTES: [u8; 128] = bytes_of_bf16(1);

const fn bytes_of_bf16(byte: usize) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = (i as f32).to_bits().to_le_bytes()[2 + byte];
        i += 1;
    }
    bytes
}

/// 64 integers, none of them -128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn widen(bytes: __m512i) -> [__m512i; 2] {
    let look_up = |table: &[u8; 128], index| {
        // SAFETY: both halves of the table.
        let [low, high] =
            [0, 64].map(|at| unsafe { _mm512_loadu_si512(table[at..].as_ptr().cast()) });
        _mm512_permutex2var_epi8(low, index, high)
    };
    // What an instruction interleaves lies in pieces of 16 bytes.
    let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm512_permutexvar_epi64(order, bytes);
    let magnitudes = _mm512_abs_epi8(bytes);
    let low = look_up(&LOW_BYTES, magnitudes);
    let sign = _mm512_and_si512(bytes, _mm512_set1_epi8(i8::MIN));
    let high = _mm512_or_si512(look_up(&HIGH_BYTES, magnitudes), sign);
    [
        _mm512_unpacklo_epi8(low, high),
        _mm512_unpackhi_epi8(low, high),
    ]
}

/// # Safety
/// See [`super::TileValues`].
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
    /// Bytes of a tile.
    const TILE: usize = 1024;
    let step = head_dim * VALUE_TILE * 2;
    let mut dim = dims.start;
    // SAFETY: `weights` has `num_rows` rows in each of the tiles, `values` and `out` have `head_dim`
    // dimensions.
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
                    lines.ask_some();
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
