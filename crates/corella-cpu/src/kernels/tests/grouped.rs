//! Tests of the kernels for group-wise scaled weights.

use corella_model::FP4_LEVELS;
use half::f16;

use super::super::grouped::{CHUNK_K, GroupedShape, GroupedTile, LANE_F16_BYTES, SummedRows};
use super::super::{Form, INT8_TILE_K, Isa, PANEL_LANES, QuantiseRow};
use super::{random, tables};

/// Compares groups of all lengths, and a shorter last group, to exact integer sums that are scaled in f32 in the same
/// steps.
#[test]
fn sums_of_groups_are_scaled_in_their_order() {
    for (isa, kernels) in tables() {
        // The portable kernels multiply, then add.
        let multiply_add = |a: f32, b: f32, c: f32| match isa {
            Isa::Portable => a * b + c,
            _ => a.mul_add(b, c),
        };
        let shapes = [
            (1, 1),
            (1, 8),
            (1, 15),
            (1, 9),
            (2, 3),
            (2, 16),
            (4, 4),
            (4, 13),
            (4, 27),
        ];
        let kinds = [
            (4, false, false),
            (4, true, false),
            (4, false, true),
            (8, false, false),
        ];
        for ((group_chunks, num_chunks), (bits, has_minimum, is_fp4)) in shapes
            .into_iter()
            .flat_map(|shape| kinds.map(|kind| (shape, kind)))
        {
            let shape = GroupedShape {
                bits,
                num_chunks,
                group_chunks,
                has_minimum,
                is_fp4,
            };
            let k_len = num_chunks * CHUNK_K;
            let random = |len: usize, seed: usize| random(len, seed as u64);
            let weights = random(k_len * PANEL_LANES, num_chunks);
            // The integers include the largest magnitudes of both signs.
            let half = 1 << (bits - 1);
            let stored = |w: &f32| (w * half as f32 * 1.2 + half as f32) as i32;
            let weights = weights
                .iter()
                .map(|w| stored(w).clamp(0, 2 * half - 1) as u8);
            let weights: Vec<u8> = weights.collect();
            let heads = random(shape.num_groups() * 2 * PANEL_LANES, 2);
            let heads: Vec<f16> = heads.into_iter().map(f16::from_f32).collect();
            let head = |group: usize, which: usize, lane: usize| {
                heads[(group * 2 + which) * PANEL_LANES + lane]
            };
            let mut panel = vec![0_u8; shape.panel_bytes()];
            for lane in 0..PANEL_LANES {
                for k in 0..k_len {
                    let (at, bit) = shape.position(k, lane);
                    panel[at] |= weights[k * PANEL_LANES + lane] << bit;
                }
                for group in 0..shape.num_groups() {
                    let at = shape.scale_position(group, lane);
                    panel[at..at + 2].copy_from_slice(&head(group, 0, lane).to_ne_bytes());
                    if has_minimum {
                        let at = at + LANE_F16_BYTES;
                        panel[at..at + 2].copy_from_slice(&head(group, 1, lane).to_ne_bytes());
                    }
                }
            }
            let max_rows = kernels.rows_at_once(Form::Int8);
            let some = [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 25, 32];
            let mut all = Vec::new();
            for num_rows in some.into_iter().filter(|&n| n <= max_rows) {
                let scaled = |x: f32| (x * 160.0).clamp(-127.0, 127.0) as i8;
                let a: Vec<i8> = random(num_rows * k_len, 3)
                    .into_iter()
                    .map(scaled)
                    .collect();
                let num_blocks = k_len.div_ceil(INT8_TILE_K);
                let mut rows = vec![0_i8; num_rows * num_blocks * INT8_TILE_K];
                let mut sums = vec![0_i32; num_rows * num_chunks];
                for (row, values) in a.chunks(k_len).enumerate() {
                    let values: Vec<f32> = values.iter().map(|&x| f32::from(x)).collect();
                    // SAFETY: there is room for the row in each block, and for the sum of each chunk.
                    let sum = unsafe {
                        (kernels.quantise_row)(QuantiseRow {
                            x: values.as_ptr(),
                            n: k_len,
                            scale: 1.0,
                            out: rows.as_mut_ptr().add(row * INT8_TILE_K),
                            sums: sums.as_mut_ptr().add(row),
                            num_rows,
                        })
                    };
                    assert_eq!(sum, values.iter().sum::<f32>() as i32, "{isa}");
                }
                let mut expected = vec![0.0_f32; num_rows * PANEL_LANES];
                for (i, acc) in expected.iter_mut().enumerate() {
                    let (row, lane) = (i / PANEL_LANES, i % PANEL_LANES);
                    for group in 0..shape.num_groups() {
                        let (mut sum, mut row_sum) = (0, 0);
                        let chunks = shape.chunks(group);
                        for k in chunks.start * CHUNK_K..chunks.end * CHUNK_K {
                            let x = i32::from(a[row * k_len + k]);
                            let stored = weights[k * PANEL_LANES + lane];
                            sum += x * match (is_fp4, has_minimum) {
                                (true, _) => i32::from(FP4_LEVELS[usize::from(stored)]),
                                (false, true) => i32::from(stored),
                                (false, false) => i32::from(stored) - half,
                            };
                            row_sum += x;
                        }
                        *acc = multiply_add(sum as f32, head(group, 0, lane).to_f32(), *acc);
                        if has_minimum {
                            let minimum = head(group, 1, lane).to_f32();
                            *acc = multiply_add(row_sum as f32, minimum, *acc);
                        }
                    }
                }
                all.push((rows, sums, expected));
            }
            // The tiles are computed one by one, and all together.
            let alone = all.iter().map(std::slice::from_ref);
            for tiles in alone.chain([all.as_slice()]) {
                for fetch_ahead in [false, true] {
                    let mut outs = vec![vec![f32::NAN; max_rows * PANEL_LANES]; tiles.len()];
                    let calls =
                        tiles
                            .iter()
                            .zip(&mut outs)
                            .map(|((rows, sums, _), out)| GroupedTile {
                                rows: SummedRows {
                                    rows: rows.as_ptr().cast(),
                                    num_rows: sums.len() / num_chunks,
                                    sums: sums.as_ptr(),
                                },
                                out: out.as_mut_ptr(),
                            });
                    let calls: Vec<_> = calls.collect();
                    // SAFETY: the extents are those that the kernel demands.
                    unsafe {
                        (kernels.grouped_gemm)(&calls, panel.as_ptr(), shape, fetch_ahead);
                        if let Some(unit) = kernels.tile_gemm.and_then(|tiles| tiles.unit) {
                            (unit.release)();
                        }
                    }
                    for (out, (_, _, expected)) in outs.iter().zip(tiles) {
                        let num_rows = expected.len() / PANEL_LANES;
                        let out = &out[..expected.len()];
                        assert_eq!(out, expected, "{isa} {num_rows} rows, {shape:?}");
                    }
                }
            }
        }
    }
}

/// No weight may be off by a whole step. The squared error of a group may be little more than the squared error of
/// rounding.
#[test]
fn groups_are_quantised_with_small_errors() {
    for (isa, kernels) in tables() {
        for group_len in [32, 64, 128] {
            const NUM_GROUPS: usize = 9;
            let mut x = random(NUM_GROUPS * group_len, 11);
            x[..group_len].fill(0.0);
            for x in &mut x[group_len..2 * group_len] {
                *x *= 1e-30;
            }
            let quantise = |x: &[f32]| {
                let (mut q, mut scales) = (vec![u8::MAX; x.len()], vec![f32::NAN; NUM_GROUPS]);
                let (to, to_scales) = (q.as_mut_ptr(), scales.as_mut_ptr());
                // SAFETY: the slices consist of whole groups.
                unsafe {
                    (kernels.quantise_groups)(x.as_ptr(), NUM_GROUPS, group_len, to, to_scales);
                }
                (q, scales)
            };
            let (q, scales) = quantise(&x);
            assert!(q.iter().all(|&q| q < 16), "{isa}");
            for (group, x) in x.chunks(group_len).enumerate() {
                let q = &q[group * group_len..];
                let scale = f64::from(scales[group]);
                let mut error = 0.0;
                for (x, q) in x.iter().zip(q) {
                    let x = f64::from(*x);
                    let off = x - scale * (f64::from(*q) - 8.0);
                    assert!(off.abs() <= scale.abs(), "{isa}: {x} in group {group}");
                    error += off * off;
                }
                let rounding = scale * scale / 12.0 * group_len as f64;
                assert!(error <= 1.5 * rounding, "{isa}: group {group}");
            }
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                x[0] = odd;
                x[2 * group_len] = odd;
                let (_, scales) = quantise(&x);
                assert!(scales[0].is_nan() && scales[2].is_nan(), "{isa} {odd}");
                assert!(scales[1].is_finite() && scales[3].is_finite());
            }
        }
    }
}
