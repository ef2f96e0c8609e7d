//! Attention over bf16 keys and values through AMX matrix tiles.
//!
//! As in dense layers, a tile instruction works on each of its rows by itself: which rows share a
//! tile reaches no result. Weights of positions that a row may not see are 0 and add nothing.

use std::arch::asm;
use std::arch::x86_64::*;

use super::amx::{TileShape, configure, release};
use super::avx512::first_lanes;
use super::{TILE_ATTENTION_BLOCK, TILE_K, TILE_POSITIONS, TileAttention};

pub const TILE_ATTENTION: TileAttention = TileAttention {
    max_rows: 32,
    scores,
    softmax,
    values,
    release,
};

/// Between a tile's row 0 and the row 0 of the tile below it.
const SCORES_BELOW: usize = 16 * TILE_ATTENTION_BLOCK * 4;
const WEIGHTS_BELOW: usize = 16 * TILE_ATTENTION_BLOCK * 2;

/// # Safety
/// See [`super::TileScores`].
unsafe fn scores(
    q: *const u16,
    num_rows: usize,
    keys: &[*const u8],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    debug_assert!(head_dim.is_multiple_of(TILE_K) && head_dim > 0);
    let shape = TileShape {
        num_rows,
        k: TILE_K,
    };
    let (block_bytes, key_bytes) = (num_rows * TILE_K * 2, 16 * stride);
    let num_blocks = head_dim / TILE_K;
    // SAFETY: reads `num_rows` queries and, of each group, `head_dim / 2` rows of 64 bytes; writes
    // `num_rows` rows of 32 scores for each two groups.
    unsafe {
        configure(shape);
        for (pair, keys) in keys.chunks(2).enumerate() {
            let out = out.add(pair * 2 * TILE_POSITIONS);
            let (k0, k1) = (keys[0], *keys.get(1).unwrap_or(&keys[0]));
            if num_rows > 16 {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    "tileloadd tmm4, [{q} + {line}]",
                    "tileloadd tmm6, [{k0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{k1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{q} + {line} + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {q}, {block_bytes}", "add {k0}, {key_bytes}", "add {k1}, {key_bytes}",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {out_bytes}], tmm0",
                    "tilestored [{out} + {out_bytes} + 64], tmm1",
                    "tilestored [{out} + {out_bytes} + {below}], tmm2",
                    "tilestored [{out} + {out_bytes} + {below} + 64], tmm3",
                    q = inout(reg) q => _, k0 = inout(reg) k0 => _, k1 = inout(reg) k1 => _,
                    n = inout(reg) num_blocks => _,
                    line = in(reg) TILE_K * 2, stride = in(reg) stride,
                    block_bytes = in(reg) block_bytes, key_bytes = in(reg) key_bytes,
                    out = in(reg) out, out_bytes = in(reg) TILE_ATTENTION_BLOCK * 4,
                    below = const SCORES_BELOW,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "2:",
                    "tileloadd tmm4, [{q} + {line}]",
                    "tileloadd tmm6, [{k0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{k1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {q}, {block_bytes}", "add {k0}, {key_bytes}", "add {k1}, {key_bytes}",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {out_bytes}], tmm0",
                    "tilestored [{out} + {out_bytes} + 64], tmm1",
                    q = inout(reg) q => _, k0 = inout(reg) k0 => _, k1 = inout(reg) k1 => _,
                    n = inout(reg) num_blocks => _,
                    line = in(reg) TILE_K * 2, stride = in(reg) stride,
                    block_bytes = in(reg) block_bytes, key_bytes = in(reg) key_bytes,
                    out = in(reg) out, out_bytes = in(reg) TILE_ATTENTION_BLOCK * 4,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    }
}

/// In powers of two, so that no range needs a check: too small ones are 0.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn softmax(
    scores: *const f32,
    scale: f32,
    limit: usize,
    len: usize,
    max: &mut f32,
    sums: *mut f32,
    weights: *mut u16,
) -> f32 {
    let factor = _mm512_set1_ps(scale * std::f32::consts::LOG2_E);
    // SAFETY: `scores` has `limit` elements, `weights` `len`, a multiple of 16, `sums` 16.
    unsafe {
        let mut block_max = _mm512_set1_ps(*max);
        let mut i = 0;
        while i < limit {
            let mask = first_lanes(limit - i);
            let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
            let s = _mm512_mask_loadu_ps(lowest, mask, scores.add(i));
            block_max = _mm512_max_ps(block_max, _mm512_mul_ps(s, factor));
            i += 16;
        }
        let new_max = _mm512_reduce_max_ps(block_max);
        let shrink = if limit == 0 || new_max == *max {
            1.0
        } else {
            _mm512_cvtss_f32(exp2_lanes(_mm512_set1_ps((*max - new_max).max(-1000.0))))
        };
        *max = new_max;
        let mut sum = _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(shrink));
        let mut i = 0;
        while i < len {
            let mask = first_lanes(limit.saturating_sub(i));
            let s = _mm512_maskz_loadu_ps(mask, scores.add(i));
            let x = _mm512_fmsub_ps(s, factor, _mm512_set1_ps(new_max));
            let w = _mm512_maskz_mov_ps(mask, exp2_lanes(x));
            sum = _mm512_add_ps(sum, w);
            let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(w));
            _mm256_storeu_si256(weights.add(i).cast(), rounded);
            i += 16;
        }
        _mm512_storeu_ps(sums, sum);
        shrink
    }
}

/// 2ˣ for x of at most about 0: 2ⁿ · p(r), |r| ≤ 1/2. p is the polynomial of degree 5 with the
/// smallest relative error, 2e-7 on that interval, far below the half percent of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn exp2_lanes(x: __m512) -> __m512 {
    const COEFFICIENTS: [f32; 6] = [
        1.327_642_8e-3,
        9.675_541e-3,
        5.550_713_4e-2,
        0.240_221_2,
        std::f32::consts::LN_2,
        1.000_000_1,
    ];
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    _mm512_scalef_ps(p, n)
}

/// # Safety
/// See [`super::TileValues`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn values(
    weights: *const u16,
    num_rows: usize,
    scale: *const f32,
    values: &[*const u8],
    head_dim: usize,
    out: *mut f32,
) {
    debug_assert!(head_dim.is_multiple_of(32));
    let shape = TileShape {
        num_rows,
        k: TILE_POSITIONS,
    };
    let row_bytes = head_dim * 4;
    // SAFETY: `weights` has `num_rows` rows that cover the tiles, each of which has 8 rows of `head_dim * 4` bytes; `out` has `num_rows` rows of `head_dim`.
    unsafe {
        for row in 0..num_rows {
            let scale = *scale.add(row);
            if scale != 1.0 {
                let out = out.add(row * head_dim);
                for i in (0..head_dim).step_by(16) {
                    let old = _mm512_loadu_ps(out.add(i));
                    _mm512_storeu_ps(out.add(i), _mm512_mul_ps(old, _mm512_set1_ps(scale)));
                }
            }
        }
        configure(shape);
        for dim in (0..head_dim).step_by(32) {
            let out = out.add(dim);
            if num_rows > 16 {
                asm!(
                    "tileloadd tmm0, [{out} + {row_bytes}]",
                    "tileloadd tmm1, [{out} + {row_bytes} + 64]",
                    "tileloadd tmm2, [{below} + {row_bytes}]",
                    "tileloadd tmm3, [{below} + {row_bytes} + 64]",
                    "2:",
                    "mov {v}, [{values}]",
                    "add {v}, {dim}",
                    "tileloadd tmm4, [{w} + {w_bytes}]",
                    "tileloadd tmm6, [{v} + {row_bytes}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{v} + {row_bytes} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{w} + {w_bytes} + {w_below}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {values}, 8", "add {w}, {w_step}", "dec {n}", "jnz 2b",
                    "tilestored [{out} + {row_bytes}], tmm0",
                    "tilestored [{out} + {row_bytes} + 64], tmm1",
                    "tilestored [{below} + {row_bytes}], tmm2",
                    "tilestored [{below} + {row_bytes} + 64], tmm3",
                    out = in(reg) out, below = in(reg) out.add(16 * head_dim),
                    row_bytes = in(reg) row_bytes, v = out(reg) _,
                    values = inout(reg) values.as_ptr() => _, n = inout(reg) values.len() => _,
                    dim = in(reg) dim * 4,
                    w = inout(reg) weights => _, w_step = in(reg) TILE_POSITIONS * 2,
                    w_bytes = in(reg) TILE_ATTENTION_BLOCK * 2, w_below = const WEIGHTS_BELOW,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            } else {
                asm!(
                    "tileloadd tmm0, [{out} + {row_bytes}]",
                    "tileloadd tmm1, [{out} + {row_bytes} + 64]",
                    "2:",
                    "mov {v}, [{values}]",
                    "add {v}, {dim}",
                    "tileloadd tmm4, [{w} + {w_bytes}]",
                    "tileloadd tmm6, [{v} + {row_bytes}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{v} + {row_bytes} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {values}, 8", "add {w}, {w_step}", "dec {n}", "jnz 2b",
                    "tilestored [{out} + {row_bytes}], tmm0",
                    "tilestored [{out} + {row_bytes} + 64], tmm1",
                    out = in(reg) out, row_bytes = in(reg) row_bytes, v = out(reg) _,
                    values = inout(reg) values.as_ptr() => _, n = inout(reg) values.len() => _,
                    dim = in(reg) dim * 4,
                    w = inout(reg) weights => _, w_step = in(reg) TILE_POSITIONS * 2,
                    w_bytes = in(reg) TILE_ATTENTION_BLOCK * 2,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    }
}
