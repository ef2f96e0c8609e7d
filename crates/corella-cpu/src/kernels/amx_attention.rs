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
    KEY_TILE, LineStream, ROW_TILE_LEN, RowSums, TILE_ATTENTION_BLOCK, TILE_K, TILE_SOFTMAX_BLOCK,
    TileAttention, TileProduct, TileSoftmax, VALUE_TILE, tile_out_index,
};

pub const TILE_ATTENTION: TileAttention = TileAttention {
    configure,
    norm_rotate_rounded,
    fetch,
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

/// # Safety
/// See [`super::TileScores`].
unsafe fn scores(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: &[*const u8],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    debug_assert!(head_dim.is_multiple_of(TILE_K) && head_dim > 0);
    debug_assert!(keys.len().is_multiple_of(2) && keys.len() * KEY_TILE <= TILE_SOFTMAX_BLOCK);
    let num_blocks = head_dim / TILE_K;
    let key_bytes = 16 * stride;
    let mut keys = keys;
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
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    apart!("tileloadd tmm4, [{q} + {q_stride}]"),
                    apart!("tileloadd tmm5, [{k0} + {stride}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm5"),
                    apart!("tileloadd tmm6, [{k1} + {stride}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm6"),
                    apart!("tileloadd tmm7, [{k2} + {stride}]"),
                    apart!("tdpbf16ps tmm2, tmm4, tmm7"),
                    apart!("tileloadd tmm5, [{k3} + {stride}]"),
                    apart!("tdpbf16ps tmm3, tmm4, tmm5"),
                    "add {q}, {block_bytes}", "add {k0}, {key_bytes}", "add {k1}, {key_bytes}",
                    "add {k2}, {key_bytes}", "add {k3}, {key_bytes}",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {out_bytes}], tmm0",
                    "tilestored [{out} + {out_bytes} + 64], tmm1",
                    "tilestored [{out} + {out_bytes} + 128], tmm2",
                    "tilestored [{out} + {out_bytes} + 192], tmm3",
                    q = inout(reg) q => _, k0 = inout(reg) *k0 => _, k1 = inout(reg) *k1 => _,
                    k2 = inout(reg) *k2 => _, k3 = inout(reg) *k3 => _,
                    n = inout(reg) num_blocks => _,
                    q_stride = in(reg) q_stride, stride = in(reg) stride,
                    block_bytes = const TILE_K * 2, key_bytes = in(reg) key_bytes,
                    out = in(reg) out, out_bytes = in(reg) SCORE_ROW_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
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
unsafe fn softmax(mut block: TileSoftmax<'_>, products: &[TileProduct]) {
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

/// Into the second cache: the first one is full of what is being worked on.
fn fetch(streams: &[LineStream], num_lines: usize) {
    for line in 0..num_lines {
        for LineStream { first, stride } in streams {
            // SAFETY: a prefetch may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(first.wrapping_add(line * stride).cast()) };
        }
    }
}

/// # Safety
/// See [`TileAttention::store_row`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn store_row(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut f32) {
    let scale = row_scale(sums);
    for i in (0..head_dim).step_by(16) {
        // SAFETY: `head_dim` dimensions each.
        unsafe { _mm512_storeu_ps(to.add(i), scaled(out, i, scale)) };
    }
}

/// # Safety
/// See [`TileAttention::store_rounded`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn store_rounded(
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
unsafe fn copy_values(from: *const u8, num_positions: usize, head_dim: usize, to: *mut u16) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(16) {
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn widen_values(from: *const u8, num_positions: usize, head_dim: usize, to: *mut u16) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(16) {
            // SAFETY: rows of `head_dim` pairs; what is masked is not read.
            unsafe {
                let row = from.cast::<i8>().add((pair * head_dim + i) * 2);
                let wide = widen(_mm256_maskz_loadu_epi8(mask, row));
                _mm512_storeu_si512(to.add(i * VALUE_TILE + pair * 32).cast(), wide);
            }
        }
    }
}

/// # Safety
/// See [`TileAttention::widen_keys`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn widen_keys(from: *const u8, stride: usize, head_dim: usize, to: *mut u16) {
    for pair in 0..head_dim / 2 {
        // SAFETY: 16 positions of a pair of dimensions each.
        unsafe {
            let row = _mm256_loadu_si256(from.add(pair * stride).cast());
            _mm512_storeu_si512(to.add(pair * 32).cast(), widen(row));
        }
    }
}

/// bf16 has 8 bits of precision: enough for what is at most 127.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn widen(bytes: __m256i) -> __m512i {
    let low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    let high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256::<1>(bytes)));
    // SAFETY: both are 64 bytes.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// # Safety
/// See [`super::TileValues`].
unsafe fn values(
    weights: *const u16,
    num_rows: usize,
    values: *const u16,
    num_tiles: usize,
    head_dim: usize,
    dims: Range<usize>,
    out: *mut f32,
) {
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
                asm!(
                    "tileloadd tmm0, [{out} + {line}]",
                    "tileloadd tmm1, [{out} + {line} + 2*{tile}]",
                    "tileloadd tmm2, [{out} + {line} + 4*{tile}]",
                    "tileloadd tmm3, [{out} + {line} + 6*{tile}]",
                    "2:",
                    apart!("tileloadd tmm4, [{w} + {line}]"),
                    apart!("tileloadd tmm5, [{v} + {line}]"),
                    apart!("tdpbf16ps tmm0, tmm4, tmm5"),
                    apart!("tileloadd tmm6, [{v} + {line} + {tile}]"),
                    apart!("tdpbf16ps tmm1, tmm4, tmm6"),
                    apart!("tileloadd tmm7, [{v} + {line} + 2*{tile}]"),
                    apart!("tdpbf16ps tmm2, tmm4, tmm7"),
                    apart!("tileloadd tmm5, [{v} + {line} + 3*{tile}]"),
                    apart!("tdpbf16ps tmm3, tmm4, tmm5"),
                    "add {v}, {step}", "add {w}, {row_tile}", "dec {n}", "jnz 2b",
                    "tilestored [{out} + {line}], tmm0",
                    "tilestored [{out} + {line} + 2*{tile}], tmm1",
                    "tilestored [{out} + {line} + 4*{tile}], tmm2",
                    "tilestored [{out} + {line} + 6*{tile}], tmm3",
                    out = in(reg) out, v = inout(reg) v => _, w = inout(reg) weights => _,
                    n = inout(reg) num_tiles => _, line = in(reg) LINE, step = in(reg) step,
                    tile = const TILE, row_tile = const ROW_TILE_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
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
