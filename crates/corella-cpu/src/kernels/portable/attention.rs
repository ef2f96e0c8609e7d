//! Attention in plain Rust.

use crate::kernels::{
    ATTENTION_BLOCK, ATTENTION_LANES, KeyGroup, ValueRun, element_size, value_stride, with_rows,
};

use super::{exp_lane, load_lanes};

/// # Safety
/// See `Kernels::scores`.
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
            with_rows!(num_rows, M in [1 2 3 4],
                scores_tile::<FORMAT, M>(q, group, stride, head_dim, out));
        }
    }
}

unsafe fn scores_tile<const FORMAT: u8, const M: usize>(
    q: *const f32,
    group: &KeyGroup,
    stride: usize,
    head_dim: usize,
    out: *mut f32,
) {
    // SAFETY: `q` has head_dim * M elements. KV memory may be read 16 lanes from any key on. Only
    // the group's own lanes are written.
    unsafe {
        let mut acc = [[0.0f32; ATTENTION_LANES]; M];
        for i in 0..head_dim {
            let keys = load_lanes::<FORMAT, ATTENTION_LANES>(group.keys.add(i * stride));
            for r in 0..M {
                let q = *q.add(i * M + r);
                for l in 0..ATTENTION_LANES {
                    acc[r][l] += q * keys[l];
                }
            }
        }
        for r in 0..M {
            let out = out.add(r * ATTENTION_BLOCK + group.offset);
            std::ptr::copy_nonoverlapping(acc[r].as_ptr(), out, group.num_positions);
        }
    }
}

/// # Safety
/// See `Kernels::softmax_block`.
pub unsafe fn softmax_block(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32 {
    // SAFETY: `scores` has a block of elements, `sums` has 16.
    let (scores, sums) = unsafe {
        (
            std::slice::from_raw_parts_mut(scores, ATTENTION_BLOCK),
            std::slice::from_raw_parts_mut(sums, 16),
        )
    };
    let limit = limit.min(ATTENTION_BLOCK);
    let new_max = scores[..limit].iter().copied().fold(*max, f32::max);
    let scale = if limit == 0 || new_max == *max {
        1.0
    } else {
        exp_lane(*max - new_max)
    };
    *max = new_max;
    for sum in &mut *sums {
        *sum *= scale;
    }
    for (j, score) in scores.iter_mut().enumerate() {
        let weight = if j < limit {
            exp_lane(*score - new_max)
        } else {
            0.0
        };
        sums[j % 16] += weight;
        *score = weight;
    }
    scale
}

/// # Safety
/// See `Kernels::values`.
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
        // SAFETY: the caller upholds the contract, and 16 lanes are left.
        unsafe {
            with_rows!(num_rows, M in [1 2 3 4],
                values_tile::<FORMAT, M>(weights, scale, runs, head_dim, lane, out));
        }
    }
}

unsafe fn values_tile<const FORMAT: u8, const M: usize>(
    weights: *const f32,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    lane: usize,
    out: *mut f32,
) {
    let out_stride = value_stride(head_dim);
    // SAFETY: rows of `weights` cover the runs' positions, rows of `out` the lanes. KV memory may
    // be read 16 lanes from any value on.
    unsafe {
        let mut acc = [[0.0f32; ATTENTION_LANES]; M];
        for r in 0..M {
            for l in 0..ATTENTION_LANES {
                acc[r][l] = *out.add(r * out_stride + lane + l) * *scale.add(r);
            }
        }
        let mut weights = weights;
        for run in runs {
            for j in 0..run.num_positions {
                let row = run.values.add((j * head_dim + lane) * element_size(FORMAT));
                let v = load_lanes::<FORMAT, ATTENTION_LANES>(row);
                for r in 0..M {
                    let weight = *weights.add(r * ATTENTION_BLOCK);
                    for l in 0..ATTENTION_LANES {
                        acc[r][l] += weight * v[l];
                    }
                }
                weights = weights.add(1);
            }
        }
        for r in 0..M {
            for l in 0..ATTENTION_LANES {
                *out.add(r * out_stride + lane + l) = acc[r][l];
            }
        }
    }
}
