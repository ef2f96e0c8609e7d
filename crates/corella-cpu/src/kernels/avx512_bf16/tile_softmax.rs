//! The softmax of attention with bf16 pair products, one row at a time.
//!
//! Softmax weights are powers of two relative to the row's reference, an integer exponent. A score that exceeds the
//! reference by more than 16 raises the reference. Earlier sums are then scaled by a power of two, exactly.

use std::arch::x86_64::*;

use crate::kernels::avx512::first_lanes;
use crate::kernels::{
    ROW_TILE_LEN, RowSums, TILE_ATTENTION_BLOCK, TILE_K, TILE_SOFTMAX_BLOCK, TileSoftmax,
    VALUE_TILE, tile_out_index,
};

const VECTORS: usize = TILE_SOFTMAX_BLOCK / 16;
/// The number of powers of two by which a score may exceed its row's reference before the reference is raised.
const HEADROOM: f32 = 16.0;

/// Turns a row's scores into weights.
///
/// # Safety
/// See [`TileSoftmax`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub unsafe fn softmax_row(block: &mut TileSoftmax<'_>, row: usize) {
    let factor = _mm512_set1_ps(block.scale * std::f32::consts::LOG2_E);
    let (end, all) = (block.ends[row], block.start + TILE_SOFTMAX_BLOCK);
    // SAFETY: `scores` has a row of `TILE_SOFTMAX_BLOCK` elements, `weights` tiles for as many.
    unsafe {
        let scores = block.scores.add(row * TILE_SOFTMAX_BLOCK);
        if end >= all {
            let s = std::array::from_fn(|v| _mm512_loadu_ps(scores.add(v * 16)));
            weigh_scores(block, row, s, factor, [0xffff; VECTORS]);
        } else if end > block.start {
            let num_seen = end - block.start;
            let masks = std::array::from_fn(|v| first_lanes(num_seen.saturating_sub(v * 16)));
            let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
            let s =
                std::array::from_fn(|v| _mm512_mask_loadu_ps(lowest, masks[v], scores.add(v * 16)));
            weigh_scores(block, row, s, factor, masks);
        } else {
            for tile in 0..VECTORS / 2 {
                _mm512_storeu_si512(weight_row(block, row, tile), _mm512_setzero_si512());
            }
        }
    }
}

/// The number of tiles of weights in the same attention block that precede this softmax block.
fn first_tile(block: &TileSoftmax<'_>) -> usize {
    block.start % TILE_ATTENTION_BLOCK / VALUE_TILE
}

/// Returns the address of 32 consecutive weights of a row.
#[inline(always)]
fn weight_row(block: &TileSoftmax<'_>, row: usize, tile: usize) -> *mut __m512i {
    let at = (first_tile(block) + tile) * ROW_TILE_LEN + row * VALUE_TILE;
    block.weights.wrapping_add(at).cast()
}

/// Computes weights as powers of two, whose exponents need no range check: underflow gives 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn weigh_scores(
    block: &mut TileSoftmax<'_>,
    row: usize,
    s: [__m512; VECTORS],
    factor: __m512,
    masks: [__mmask16; VECTORS],
) {
    let s = match block.scales {
        None => s,
        // SAFETY: there are `TILE_SOFTMAX_BLOCK` scales; those of masked positions may be anything.
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
    // SAFETY: the row has weights and sums.
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

/// Raises a row's reference. Rescales the row's sums and outputs, and the row's weights in the attention block, which
/// are not multiplied by values yet.
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn raise(block: &mut TileSoftmax<'_>, row: usize, reference: f32) {
    let sums = &mut block.rows[row];
    if sums.reference == f32::NEG_INFINITY {
        sums.reference = reference;
        return;
    }
    let difference = _mm512_set1_ps(sums.reference - reference);
    // Both references are integers, so the factor is a power of two: rescaling is exact, and the
    // same for sums as for weights. Beyond 2⁻¹⁰⁰ nothing would be left.
    let kept = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(difference, _mm512_set1_ps(-100.0));
    let shrink = _mm512_maskz_scalef_ps(kept, _mm512_set1_ps(1.0), difference);
    sums.reference = reference;
    // SAFETY: the row has sums, an output, and weights in all tiles.
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

/// Computes 2ˣ as 2ⁿ · p(x - n), n = ⌊x⌋. p is the polynomial of degree 3 with the smallest relative error between 0
/// and 1: 8e-5, far below bf16's half percent.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub fn exp2_lanes(x: __m512) -> __m512 {
    const COEFFICIENTS: [f32; 4] = [0.078_024_52, 0.226_067_16, 0.695_833_56, 0.999_925_2];
    let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
    let mut p = _mm512_set1_ps(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    // `scalef` rounds x down too.
    _mm512_scalef_ps(p, x)
}

/// # Safety
/// See `TileAttention::store_row`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn store_row(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut f32) {
    let scale = row_scale(sums);
    for i in (0..head_dim).step_by(16) {
        // SAFETY: the row and the output have `head_dim` dimensions.
        unsafe { _mm512_storeu_ps(to.add(i), scaled(out, i, scale)) };
    }
}

/// # Safety
/// See `TileAttention::store_rounded`.
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
        // SAFETY: the row has `head_dim` dimensions, and `to` has a line per block.
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
    // SAFETY: there are 16 sums.
    let sum = _mm512_reduce_add_ps(unsafe { _mm512_load_ps(sums.sums.as_ptr()) });
    _mm512_set1_ps(1.0 / sum)
}

/// Loads 16 dimensions of a row from `i` on and scales them. Adding 0 turns -0 into 0.
///
/// # Safety
/// The row has these dimensions.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scaled(out: *const f32, i: usize, scale: __m512) -> __m512 {
    // SAFETY: the caller upholds the contract.
    let values = unsafe { _mm512_loadu_ps(out.add(tile_out_index(0, i))) };
    _mm512_fmadd_ps(values, scale, _mm512_setzero_ps())
}
