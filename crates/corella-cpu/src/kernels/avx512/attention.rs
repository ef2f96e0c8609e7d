//! Attention in f32 with AVX-512.

use std::arch::x86_64::*;

use crate::kernels::{
    ATTENTION_BLOCK, ATTENTION_LANES, KeyGroup, ValueRun, element_size, value_stride, with_rows,
};

use super::{exp_lanes, first_lanes, load_lanes};

/// # Safety
/// See `Kernels::scores`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn scores<const FORMAT: u8>(
    q: *const f32,
    num_rows: usize,
    groups: &[KeyGroup],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    let mut rest = groups;
    while !rest.is_empty() {
        let at_once = match (num_rows, rest.len()) {
            (..=6, 4..) => 4,
            (_, 2..) => 2,
            _ => 1,
        };
        // SAFETY: the caller upholds the contract, and `at_once` groups are left.
        unsafe {
            match at_once {
                4 => with_rows!(num_rows, M in [1 2 3 4 5 6],
                    scores_tile::<FORMAT, M, 4>(q, rest.as_ptr(), stride, head_dim, out)),
                2 => with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
                    scores_tile::<FORMAT, M, 2>(q, rest.as_ptr(), stride, head_dim, out)),
                _ => with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
                    scores_tile::<FORMAT, M, 1>(q, rest.as_ptr(), stride, head_dim, out)),
            }
        }
        rest = &rest[at_once..];
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn scores_tile<const FORMAT: u8, const M: usize, const P: usize>(
    q: *const f32,
    groups: *const KeyGroup,
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    // SAFETY: `q` has head_dim * M elements. KV memory may be read 16 lanes from any key on. Only a
    // group's own lanes are written.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); P]; M];
        for i in 0..head_dim {
            let q = q.add(i * M);
            let mut keys = [_mm512_setzero_ps(); P];
            for p in 0..P {
                keys[p] = load_lanes::<FORMAT>((*groups.add(p)).keys.add(i * stride));
            }
            for r in 0..M {
                let q = _mm512_set1_ps(*q.add(r));
                for p in 0..P {
                    acc[r][p] = _mm512_fmadd_ps(q, keys[p], acc[r][p]);
                }
            }
        }
        for p in 0..P {
            let group = *groups.add(p);
            let mask = first_lanes(group.num_positions);
            for r in 0..M {
                let out = out.add(r * ATTENTION_BLOCK + group.offset);
                _mm512_mask_storeu_ps(out, mask, acc[r][p]);
            }
        }
    }
}

/// # Safety
/// See `Kernels::softmax_block`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn softmax_block(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32 {
    const VECTORS: usize = ATTENTION_BLOCK / 16;
    // SAFETY: `scores` has a block of elements, `sums` has 16.
    unsafe {
        let mut s = [_mm512_set1_ps(f32::NEG_INFINITY); VECTORS];
        let mut masks = [0; VECTORS];
        let mut block_max = _mm512_set1_ps(*max);
        for v in 0..VECTORS {
            masks[v] = first_lanes(limit.saturating_sub(v * 16));
            s[v] = _mm512_mask_loadu_ps(s[v], masks[v], scores.add(v * 16));
            block_max = _mm512_max_ps(block_max, s[v]);
        }
        let new_max = _mm512_reduce_max_ps(block_max);
        let scale = if limit == 0 || new_max == *max {
            1.0
        } else {
            _mm512_cvtss_f32(exp_lanes(_mm512_set1_ps(*max - new_max)))
        };
        *max = new_max;
        let mut sum = _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(scale));
        for v in 0..VECTORS {
            let x = _mm512_sub_ps(s[v], _mm512_set1_ps(new_max));
            let weights = _mm512_maskz_mov_ps(masks[v], exp_lanes(x));
            sum = _mm512_add_ps(sum, weights);
            _mm512_storeu_ps(scores.add(v * 16), weights);
        }
        _mm512_storeu_ps(sums, sum);
        scale
    }
}

/// # Safety
/// See `Kernels::values`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn values<const FORMAT: u8>(
    weights: *const f32,
    num_rows: usize,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    out: *mut f32,
) {
    let out_stride = value_stride(head_dim);
    let mut lane = 0;
    while lane < out_stride {
        let at_once = match (num_rows, (out_stride - lane) / ATTENTION_LANES) {
            (..=6, 4..) => 4,
            (_, 2..) => 2,
            _ => 1,
        };
        // SAFETY: the caller upholds the contract, and `at_once` vectors of lanes are left.
        unsafe {
            match at_once {
                4 => with_rows!(num_rows, M in [1 2 3 4 5 6],
                    values_tile::<FORMAT, M, 4>(weights, scale, runs, head_dim, lane, out)),
                2 => with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
                    values_tile::<FORMAT, M, 2>(weights, scale, runs, head_dim, lane, out)),
                _ => with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
                    values_tile::<FORMAT, M, 1>(weights, scale, runs, head_dim, lane, out)),
            }
        }
        lane += at_once * ATTENTION_LANES;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn values_tile<const FORMAT: u8, const M: usize, const P: usize>(
    weights: *const f32,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    lane: usize,
    out: *mut f32,
) {
    let out_stride = value_stride(head_dim);
    let size = element_size(FORMAT);
    // SAFETY: rows of `weights` cover the runs' positions, rows of `out` the lanes. KV memory may
    // be read 16 lanes from any value on.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); P]; M];
        for r in 0..M {
            for p in 0..P {
                let old = _mm512_loadu_ps(out.add(r * out_stride + lane + p * 16));
                acc[r][p] = _mm512_mul_ps(old, _mm512_set1_ps(*scale.add(r)));
            }
        }
        let mut weights = weights;
        for run in runs {
            for j in 0..run.num_positions {
                let row = run.values.add((j * head_dim + lane) * size);
                let mut v = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    v[p] = load_lanes::<FORMAT>(row.add(p * 16 * size));
                }
                for r in 0..M {
                    let weight = _mm512_set1_ps(*weights.add(r * ATTENTION_BLOCK));
                    for p in 0..P {
                        acc[r][p] = _mm512_fmadd_ps(weight, v[p], acc[r][p]);
                    }
                }
                weights = weights.add(1);
            }
        }
        for r in 0..M {
            for p in 0..P {
                _mm512_storeu_ps(out.add(r * out_stride + lane + p * 16), acc[r][p]);
            }
        }
    }
}
