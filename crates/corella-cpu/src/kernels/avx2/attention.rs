//! Attention in f32 with AVX2.

use std::arch::x86_64::*;

use crate::kernels::{
    ATTENTION_BLOCK, ATTENTION_LANES, KeyGroup, ValueRun, element_size, value_stride, with_rows,
};

use super::{exp_lanes, load_lanes};

/// # Safety
/// See `Kernels::scores`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn scores<const FORMAT: u8>(
    q: *const f32,
    num_rows: usize,
    groups: &[KeyGroup],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    for group in groups {
        // SAFETY: the caller upholds the contract.
        unsafe {
            with_rows!(num_rows, M in [1 2 3 4 5 6],
                scores_tile::<FORMAT, M>(q, group, stride, head_dim, out));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scores_tile<const FORMAT: u8, const M: usize>(
    q: *const f32,
    group: &KeyGroup,
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    let half_bytes = 8 * element_size(FORMAT);
    // SAFETY: `q` has head_dim * M elements. KV memory may be read 16 lanes from any key on. Only
    // the group's own lanes are written.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; M];
        for i in 0..head_dim {
            let keys = group.keys.add(i * stride);
            for h in 0..2 {
                let keys = load_lanes::<FORMAT>(keys.add(h * half_bytes));
                for r in 0..M {
                    let q = _mm256_set1_ps(*q.add(i * M + r));
                    acc[r][h] = _mm256_fmadd_ps(q, keys, acc[r][h]);
                }
            }
        }
        for r in 0..M {
            let mut lanes = [0.0f32; ATTENTION_LANES];
            _mm256_storeu_ps(lanes.as_mut_ptr(), acc[r][0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), acc[r][1]);
            let out = out.add(r * ATTENTION_BLOCK + group.offset);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, group.num_positions);
        }
    }
}

/// # Safety
/// See `Kernels::softmax_block`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn softmax_block(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32 {
    const VECTORS: usize = ATTENTION_BLOCK / 8;
    // SAFETY: `scores` has a block of elements, `sums` has 16.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mut s = [_mm256_setzero_ps(); VECTORS];
        let mut masks = [_mm256_setzero_ps(); VECTORS];
        let mut block_max = _mm256_set1_ps(*max);
        for v in 0..VECTORS {
            let limit = _mm256_set1_epi32(limit as i32 - v as i32 * 8);
            masks[v] = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, lane));
            let all = _mm256_loadu_ps(scores.add(v * 8));
            s[v] = _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), all, masks[v]);
            block_max = _mm256_max_ps(block_max, s[v]);
        }
        let mut lanes = [0.0f32; 8];
        _mm256_storeu_ps(lanes.as_mut_ptr(), block_max);
        let new_max = lanes.into_iter().fold(*max, f32::max);
        let scale = if limit == 0 || new_max == *max {
            1.0
        } else {
            _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(*max - new_max)))
        };
        *max = new_max;
        let mut sum = [_mm256_loadu_ps(sums), _mm256_loadu_ps(sums.add(8))];
        for sum in &mut sum {
            *sum = _mm256_mul_ps(*sum, _mm256_set1_ps(scale));
        }
        for v in 0..VECTORS {
            let x = _mm256_sub_ps(s[v], _mm256_set1_ps(new_max));
            let weights = _mm256_and_ps(masks[v], exp_lanes(x));
            sum[v % 2] = _mm256_add_ps(sum[v % 2], weights);
            _mm256_storeu_ps(scores.add(v * 8), weights);
        }
        _mm256_storeu_ps(sums, sum[0]);
        _mm256_storeu_ps(sums.add(8), sum[1]);
        scale
    }
}

/// # Safety
/// See `Kernels::values`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn values<const FORMAT: u8>(
    weights: *const f32,
    num_rows: usize,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    out: *mut f32,
) {
    let out_stride = value_stride(head_dim);
    for lane in (0..out_stride).step_by(ATTENTION_LANES) {
        // SAFETY: the caller upholds the contract; the row has two more vectors from `lane` on.
        unsafe {
            with_rows!(num_rows, M in [1 2 3 4 5 6],
                values_tile::<FORMAT, M>(weights, scale, runs, head_dim, lane, out));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn values_tile<const FORMAT: u8, const M: usize>(
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
        let mut acc = [[_mm256_setzero_ps(); 2]; M];
        for r in 0..M {
            for h in 0..2 {
                let old = _mm256_loadu_ps(out.add(r * out_stride + lane + h * 8));
                acc[r][h] = _mm256_mul_ps(old, _mm256_set1_ps(*scale.add(r)));
            }
        }
        let mut weights = weights;
        for run in runs {
            for j in 0..run.num_positions {
                let row = run.values.add((j * head_dim + lane) * size);
                for h in 0..2 {
                    let v = load_lanes::<FORMAT>(row.add(h * 8 * size));
                    for r in 0..M {
                        let weight = _mm256_set1_ps(*weights.add(r * ATTENTION_BLOCK));
                        acc[r][h] = _mm256_fmadd_ps(weight, v, acc[r][h]);
                    }
                }
                weights = weights.add(1);
            }
        }
        for r in 0..M {
            for h in 0..2 {
                _mm256_storeu_ps(out.add(r * out_stride + lane + h * 8), acc[r][h]);
            }
        }
    }
}
