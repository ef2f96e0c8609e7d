//! Tests of the attention kernels that compute in f32.

use corella_model::{DType, KvFormat};

use super::super::*;
use super::{Elements, assert_dot, assert_near, random, tables};

const KV_FORMATS: [KvFormat; 4] = [
    KvFormat::Float(DType::F32),
    KvFormat::Float(DType::Bf16),
    KvFormat::Float(DType::F16),
    KvFormat::Int8,
];

#[test]
fn scores_fill_their_own_places_only() {
    for (isa, kernels) in tables() {
        for format in KV_FORMATS {
            for (page_size, head_dim) in [(16, 64), (5, 6), (1, 20), (40, 18)] {
                // There is room for reads of 16 lanes from the last key on.
                let keys = Elements::of_kv(format, head_dim * page_size + ATTENTION_LANES, 3);
                let at = |i: usize| {
                    keys.bytes
                        .as_ptr()
                        .cast::<u8>()
                        .wrapping_add(i * format.size())
                };
                let count = page_size.min(ATTENTION_LANES);
                let groups = [3, 20, 36].map(|offset| KeyGroup {
                    keys: at(page_size - count),
                    num_positions: count,
                    offset,
                });
                for num_rows in 1..=kernels.tile_rows {
                    let q = random(head_dim * num_rows, 4);
                    let mut out = vec![f32::INFINITY; num_rows * ATTENTION_BLOCK];
                    // SAFETY: the extents are those that the kernel demands.
                    unsafe {
                        (kernels.scores.of(format))(
                            q.as_ptr(),
                            num_rows,
                            &groups,
                            page_size * format.size(),
                            head_dim,
                            out.as_mut_ptr(),
                        );
                    }
                    for (i, &actual) in out.iter().enumerate() {
                        let (row, place) = (i / ATTENTION_BLOCK, i % ATTENTION_BLOCK);
                        let covers = |g: &&KeyGroup| (g.offset..g.offset + count).contains(&place);
                        let Some(group) = groups.iter().find(covers) else {
                            assert_eq!(actual, f32::INFINITY, "{isa}: place {place}");
                            continue;
                        };
                        let position = page_size - count + place - group.offset;
                        let key = |i: usize| keys.values[i * page_size + position];
                        let terms = (0..head_dim).map(|i| (q[i * num_rows + row], key(i)));
                        assert_dot(actual, terms, &format!("{isa} {format:?} {page_size}"));
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_weighs_what_may_be_seen() {
    for (isa, kernels) in tables() {
        for limit in 0..=ATTENTION_BLOCK {
            let scores: Vec<f32> = random(ATTENTION_BLOCK, 6)
                .iter()
                .map(|s| s * 40.0)
                .collect();
            let mut weights = scores.clone();
            // Masked positions may hold anything.
            weights[limit..].fill(f32::NAN);
            let (mut max, mut sums) = (-3.0, [0.25; 16]);
            // SAFETY: there is a block of scores, and there are 16 sums.
            let scale = unsafe {
                let (weights, sums) = (weights.as_mut_ptr(), sums.as_mut_ptr());
                (kernels.softmax_block)(weights, limit, &mut max, sums)
            };
            let expected_max = scores[..limit].iter().fold(-3.0f32, |a, &b| a.max(b));
            assert_eq!(max, expected_max, "{isa} limit {limit}");
            let exp = |x: f32| f64::from(x - expected_max).exp();
            assert_near(scale, exp(-3.0), &format!("{isa}: scale at {limit}"));
            let mut sum = 4.0 * exp(-3.0);
            for (i, &weight) in weights.iter().enumerate() {
                if i < limit {
                    assert_near(
                        weight,
                        exp(scores[i]),
                        &format!("{isa}: exp({})", scores[i]),
                    );
                    sum += exp(scores[i]);
                } else {
                    assert_eq!(weight, 0.0, "{isa}: place {i} of {limit}");
                }
            }
            assert_near(sum_lanes(&sums), sum, &format!("{isa}: sum at {limit}"));
        }
    }
}

#[test]
fn values_are_weighed_on_top_of_what_was() {
    for (isa, kernels) in tables() {
        for format in KV_FORMATS {
            for head_dim in [16usize, 20, 64, 80] {
                let lens = [16, 3, 1, 16];
                let values = Elements::of_kv(format, 16 * head_dim + ATTENTION_LANES, 7);
                let runs = lens.map(|num_positions| ValueRun {
                    values: values.bytes.as_ptr().cast(),
                    num_positions,
                });
                let stride = value_stride(head_dim);
                for num_rows in 1..=kernels.tile_rows {
                    let weights = random(num_rows * ATTENTION_BLOCK, 8);
                    let scale = random(num_rows, 9);
                    let before = random(num_rows * stride, 10);
                    let mut out = before.clone();
                    // SAFETY: the extents are those that the kernel demands.
                    unsafe {
                        (kernels.values.of(format))(
                            weights.as_ptr(),
                            num_rows,
                            scale.as_ptr(),
                            &runs,
                            head_dim,
                            out.as_mut_ptr(),
                        );
                    }
                    for row in 0..num_rows {
                        for i in 0..head_dim {
                            let positions = lens.iter().flat_map(|&len| 0..len);
                            let value = |j: usize| values.values[j * head_dim + i];
                            let weighed = positions.enumerate().map(|(place, j)| {
                                (weights[row * ATTENTION_BLOCK + place], value(j))
                            });
                            let at = row * stride + i;
                            let terms = std::iter::once((before[at], scale[row])).chain(weighed);
                            assert_dot(out[at], terms, &format!("{isa} {format:?} {head_dim}"));
                        }
                    }
                }
            }
        }
    }
}
