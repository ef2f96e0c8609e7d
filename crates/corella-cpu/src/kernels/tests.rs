//! Compares every kernel of every instruction set of this machine with arithmetic in f64.

use half::{bf16, f16};

use super::*;

mod grouped;
mod tile_attention;
#[cfg(target_arch = "x86_64")]
mod tile_instructions;

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
const KV_FORMATS: [KvFormat; 4] = [
    KvFormat::Float(DType::F32),
    KvFormat::Float(DType::Bf16),
    KvFormat::Float(DType::F16),
    KvFormat::Int8,
];

/// Every kind of prefetch. The last one names memory that nobody may read.
const PREFETCHES: [Prefetch; 3] = [
    Prefetch::Nothing,
    Prefetch::Ahead,
    Prefetch::Half(std::ptr::without_provenance(64)),
];

#[test]
fn gemm_sums_products_whatever_rows_stand_beside() {
    for (isa, kernels) in tables() {
        for dtype in DTYPES {
            for k in [1, 3, 64, 131] {
                let panel = Elements::new(dtype, k * PANEL_LANES, 1);
                let gemm = kernels.gemm.of(dtype);
                let tile = |a: &[f32], num_rows, fetch_ahead| {
                    let mut out = vec![f32::NAN; num_rows * PANEL_LANES];
                    let panel = panel.bytes.as_ptr().cast();
                    // SAFETY: the extents are those that the kernel demands.
                    unsafe {
                        gemm(
                            a.as_ptr(),
                            num_rows,
                            panel,
                            k,
                            fetch_ahead,
                            out.as_mut_ptr(),
                        )
                    };
                    out
                };
                for num_rows in 1..=kernels.tile_rows {
                    let a = random(k * num_rows, 2);
                    let out = tile(&a, num_rows, true);
                    assert_eq!(out, tile(&a, num_rows, false));
                    for row in 0..num_rows {
                        let alone: Vec<f32> = (0..k).map(|i| a[i * num_rows + row]).collect();
                        let actual = &out[row * PANEL_LANES..][..PANEL_LANES];
                        assert_eq!(actual, tile(&alone, 1, false), "{isa} {dtype:?}");
                        for (lane, &actual) in actual.iter().enumerate() {
                            let position = panel_position(dtype, lane);
                            let b = |i: usize| panel.values[i * PANEL_LANES + position];
                            let terms = (0..k).map(|i| (alone[i], b(i)));
                            assert_dot(actual, terms, &format!("{isa} {dtype:?} k {k}"));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn matrix_tiles_sum_products_whatever_rows_stand_beside() {
    for (isa, kernels) in tables() {
        let Some(tiles) = kernels.tile_gemm else {
            continue;
        };
        for k in [1_usize, 31, 32, 70, 256] {
            let num_blocks = k.div_ceil(TILE_K);
            let values = random(k * PANEL_LANES, 1);
            let weight = |i: usize, lane: usize| bf16::from_f32(values[i * PANEL_LANES + lane]);
            // The panel is aligned, and zero beyond k, like those in a region.
            let mut panel = vec![[0_u16; 2048 / 2]; num_blocks + 1];
            let skip = panel.as_ptr().cast::<u8>().align_offset(64) / 2;
            let panel = &mut panel.as_flattened_mut()[skip..];
            for i in 0..k {
                for lane in 0..PANEL_LANES {
                    panel[tile_position(i, lane)] = weight(i, lane).to_bits();
                }
            }
            let row_len = num_blocks * TILE_K;
            // `a` has row after row; the kernel needs block after block.
            let tile = |a: &[u16], prefetch| {
                let num_rows = a.len() / row_len;
                let mut rows = vec![0; a.len()];
                for (row, values) in a.chunks(row_len).enumerate() {
                    for (block, values) in values.chunks(TILE_K).enumerate() {
                        let at = (block * num_rows + row) * TILE_K;
                        rows[at..at + TILE_K].copy_from_slice(values);
                    }
                }
                let mut out = vec![f32::NAN; num_rows * PANEL_LANES];
                let (rows, panel) = (rows.as_ptr().cast(), panel.as_ptr().cast());
                // SAFETY: the extents are those that the kernel demands.
                unsafe {
                    if let Some(unit) = &tiles.unit {
                        (unit.configure)(num_rows);
                    }
                    (tiles.gemm)(
                        rows,
                        num_rows,
                        panel,
                        num_blocks,
                        prefetch,
                        out.as_mut_ptr(),
                        PANEL_LANES * 4,
                    );
                    if let Some(unit) = &tiles.unit {
                        let parts = in_parts(unit.gemm_part, rows, num_rows, panel, num_blocks);
                        let bits: Vec<u32> = out.iter().map(|sum| sum.to_bits()).collect();
                        assert_eq!(parts, bits, "{isa} {num_rows} rows of {k} in parts");
                        (unit.release)();
                    }
                }
                out
            };
            for num_rows in 1..=tiles.max_rows {
                let mut a = vec![0_u16; num_rows * row_len];
                for (row, values) in a.chunks_mut(row_len).zip(random(k * num_rows, 2).chunks(k)) {
                    for (to, value) in row.iter_mut().zip(values) {
                        *to = bf16::from_f32(*value).to_bits();
                    }
                }
                let out = tile(&a, Prefetch::Nothing);
                for prefetch in PREFETCHES {
                    assert_eq!(out, tile(&a, prefetch));
                }
                for (row, actual) in a.chunks(row_len).zip(out.chunks(PANEL_LANES)) {
                    assert_eq!(
                        actual,
                        tile(row, Prefetch::Nothing),
                        "{isa} {num_rows} rows"
                    );
                    for (lane, &actual) in actual.iter().enumerate() {
                        let a = |i: usize| bf16::from_bits(row[i]).to_f32();
                        let terms = (0..k).map(|i| (a(i), weight(i, lane).to_f32()));
                        assert_dot(actual, terms, &format!("{isa} k {k}"));
                    }
                }
            }
        }
    }
}

/// Runs a GEMM in two parts of k: the sums go to memory after the first half, and in the end to
/// rows that are further apart.
///
/// # Safety
/// The same as for the kernel over all of k.
unsafe fn in_parts(
    gemm: unsafe fn(&TilePart),
    rows: *const u8,
    num_rows: usize,
    panel: *const u8,
    num_blocks: usize,
) -> Vec<u32> {
    const STRIDE: usize = 48;
    let mut sums = vec![u32::MAX; num_rows * PANEL_LANES];
    let mut out = vec![u32::MAX; num_rows * STRIDE];
    let middle = num_blocks / 2;
    for (first, end) in [(0, middle), (middle, num_blocks)] {
        if first == end {
            continue;
        }
        let is_last = end == num_blocks;
        // SAFETY: the caller promises as much, and there is room for the sums and the outputs.
        unsafe {
            gemm(&TilePart {
                rows: rows.add(first * num_rows * 64),
                num_rows,
                panel: panel.add(first * 2048),
                num_blocks: end - first,
                sums: match first {
                    0 => std::ptr::null(),
                    _ => sums.as_ptr(),
                },
                next: match is_last {
                    true => std::ptr::null(),
                    false => panel,
                },
                out: match is_last {
                    true => out.as_mut_ptr(),
                    false => sums.as_mut_ptr(),
                },
                out_bytes: 4 * if is_last { STRIDE } else { PANEL_LANES },
            });
        }
    }
    let rows = out.chunks(STRIDE).map(|row| &row[..PANEL_LANES]);
    rows.flatten().copied().collect()
}

#[test]
fn sums_of_8_bit_integers_are_exact() {
    for (isa, kernels) in tables() {
        for k in [1_usize, 63, 64, 200, 1024] {
            let num_blocks = k.div_ceil(INT8_TILE_K);
            // Some integers are the largest possible, so that anything narrower than 32 bits would
            // overflow.
            let weights = integers(k * PANEL_LANES, 1);
            let mut panel = vec![0_i8; num_blocks * INT8_TILE_K * PANEL_LANES];
            for i in 0..k {
                for lane in 0..PANEL_LANES {
                    panel[int8_position(i, lane)] = weights[i * PANEL_LANES + lane];
                }
            }
            for num_rows in 1..=kernels.rows_at_once(Form::Int8) {
                let a = integers(num_rows * k, 2);
                let mut rows = vec![0_i8; num_rows * num_blocks * INT8_TILE_K];
                for (row, values) in a.chunks(k).enumerate() {
                    for (block, values) in values.chunks(INT8_TILE_K).enumerate() {
                        let at = (block * num_rows + row) * INT8_TILE_K;
                        rows[at..at + values.len()].copy_from_slice(values);
                    }
                }
                let expected: Vec<i32> = (0..num_rows * PANEL_LANES)
                    .map(|i| {
                        let (row, lane) = (i / PANEL_LANES, i % PANEL_LANES);
                        let a = |i: usize| i32::from(a[row * k + i]);
                        let w = |i: usize| i32::from(weights[i * PANEL_LANES + lane]);
                        (0..k).map(|i| a(i) * w(i)).sum()
                    })
                    .collect();
                let (rows, panel) = (rows.as_ptr().cast(), panel.as_ptr().cast());
                let sum = |row: &[i8]| row.iter().map(|&x| i32::from(x)).sum::<i32>();
                let row_sums: Vec<i32> = a.chunks(k).map(sum).collect();
                for prefetch in PREFETCHES {
                    let mut out = vec![i32::MIN; num_rows * PANEL_LANES];
                    let to = out.as_mut_ptr();
                    // SAFETY: the extents are those that the kernel demands.
                    unsafe {
                        let unit = kernels.tile_gemm.and_then(|tiles| tiles.unit);
                        if let Some(unit) = unit {
                            (unit.configure)(num_rows);
                        }
                        let rows = Int8Rows {
                            rows,
                            num_rows,
                            sums: row_sums.as_ptr(),
                        };
                        (kernels.int8_gemm)(rows, panel, num_blocks, prefetch, to, 128);
                        if let Some(unit) = unit {
                            let gemm = unit.int8_gemm_part;
                            let parts = in_parts(gemm, rows.rows, num_rows, panel, num_blocks);
                            let bits: Vec<u32> = out.iter().map(|&sum| sum as u32).collect();
                            assert_eq!(parts, bits, "{isa} {num_rows} rows of {k} in parts");
                        }
                    }
                    assert_eq!(out, expected, "{isa} {num_rows} rows of {k}");
                }
            }
        }
    }
}

#[test]
fn rows_are_quantised_to_the_nearest() {
    for (isa, kernels) in tables() {
        for n in [1, 15, 16, 70] {
            let mut x = random(n, 3);
            x[n / 2] = -1.0;
            let mut out = vec![0_i8; n];
            // SAFETY: input and output have n elements each.
            let most = unsafe {
                (kernels.quantise)(x.as_ptr(), n, 127.0, out.as_mut_ptr());
                (kernels.largest_bits)(x.as_ptr(), n)
            };
            assert_eq!(f32::from_bits(most), 1.0);
            for (x, out) in x.iter().zip(out) {
                assert_eq!(f32::from(out), (x * 127.0).round_ties_even(), "{isa} {x}");
            }
            for odd in [f32::NAN, -f32::NAN, f32::NEG_INFINITY] {
                x[n - 1] = odd;
                // SAFETY: the slice has n elements.
                let most = unsafe { (kernels.largest_bits)(x.as_ptr(), n) };
                assert!(most >= f32::INFINITY.to_bits(), "{isa} {odd} of {n}");
            }
        }
    }
}

#[test]
fn hadamard_spreads_each_element_and_is_its_own_inverse() {
    for (isa, kernels) in tables() {
        for n in [16, 48, 256, 480, 512] {
            let stride = n / HADAMARD_ORDER;
            let mut spread = vec![0.0_f32; n];
            for i in 0..n {
                spread.fill(0.0);
                spread[i] = 4.0;
                // SAFETY: the slice has n elements.
                unsafe { (kernels.hadamard)(spread.as_mut_ptr(), n) };
                for (j, value) in spread.iter().enumerate() {
                    // The sign of an entry is given by the bits that row and column have in common
                    // (Sylvester).
                    let sign = ((i / stride) & (j / stride)).count_ones() % 2;
                    let expected = match i % stride == j % stride {
                        true => 1.0 - 2.0 * sign as f32,
                        false => 0.0,
                    };
                    assert_eq!(*value, expected, "{isa} {i} to {j} of {n}");
                }
            }
            // With integers every step is exact.
            let x: Vec<f32> = (0..n).map(|i| (i * i % 1001) as f32 - 500.0).collect();
            let mut twice = x.clone();
            // SAFETY: the slice has n elements.
            unsafe {
                (kernels.hadamard)(twice.as_mut_ptr(), n);
                (kernels.hadamard)(twice.as_mut_ptr(), n);
            }
            assert_eq!(twice, x, "{isa} {n}");
        }
    }
}

#[test]
fn sums_are_scaled_by_row_and_lane() {
    for (isa, kernels) in tables() {
        let sums: Vec<i32> = (0..3 * PANEL_LANES as i32)
            .map(|i| i * 1001 - 40_000)
            .collect();
        let (rows, lanes) = (random(3, 4), random(PANEL_LANES, 5));
        let mut out = vec![0.0_f32; 3 * 40];
        // SAFETY: there are three input rows of 32, and three output rows that are 40 apart.
        unsafe {
            let (rows, lanes) = (rows.as_ptr(), lanes.as_ptr());
            (kernels.scale_sums)(sums.as_ptr(), 3, rows, lanes, out.as_mut_ptr(), 40);
        }
        for (i, sum) in sums.iter().enumerate() {
            let (row, lane) = (i / PANEL_LANES, i % PANEL_LANES);
            let expected = *sum as f32 * rows[row] * lanes[lane];
            assert_eq!(out[row * 40 + lane], expected, "{isa}");
        }
    }
}

#[test]
fn heads_are_normed_and_rotated() {
    for (isa, kernels) in tables() {
        for (head_dim, has_norm) in [(2, true), (24, false), (64, true), (96, true), (128, false)] {
            let (x, weight) = (random(head_dim, 1), random(head_dim, 2));
            let turn = |i: usize| (i as f64 * 0.37).sin_cos();
            let half = head_dim / 2;
            let angles: Vec<f32> = (0..half)
                .map(|i| turn(i).1 as f32)
                .chain((0..half).map(|i| turn(i).0 as f32))
                .collect();
            let from = NormRotate {
                x: x.as_ptr(),
                weight: if has_norm {
                    weight.as_ptr()
                } else {
                    std::ptr::null()
                },
                eps: 1e-6,
                angles: angles.as_ptr(),
                head_dim,
            };
            let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let scale = 1.0 / (squares / head_dim as f64 + 1e-6).sqrt();
            let normed = |i: usize| match has_norm {
                true => f64::from(x[i]) * scale * f64::from(weight[i]),
                false => f64::from(x[i]),
            };
            let mut out = x.clone();
            let mut rounded = vec![0; head_dim];
            // SAFETY: all slices have as many elements as the head.
            unsafe {
                (kernels.norm_rotate)(
                    NormRotate {
                        x: out.as_ptr(),
                        ..from
                    },
                    out.as_mut_ptr(),
                );
                if head_dim.is_multiple_of(TILE_K)
                    && let Some(tiles) = &kernels.tile_attention
                {
                    (tiles.norm_rotate_rounded)(from, rounded.as_mut_ptr());
                    let expected = out.iter().map(|&x| bf16::from_f32(x).to_bits());
                    assert!(rounded.into_iter().eq(expected), "{isa} {head_dim}");
                }
            }
            for i in 0..half {
                let (sin, cos) = turn(i);
                let (a, b) = (normed(i), normed(half + i));
                for (at, expected) in [(i, a * cos - b * sin), (half + i, b * cos + a * sin)] {
                    let error = (f64::from(out[at]) - expected).abs();
                    assert!(error < 1e-6, "{isa} {head_dim}: {at} is off by {error}");
                }
            }
        }
    }
}

#[test]
fn squares_are_summed_to_the_last_element() {
    for (isa, kernels) in tables() {
        for n in (1..70).chain([1000]) {
            let x = random(n, n as u64);
            // SAFETY: the pointer and the length are those of `x`.
            let actual = unsafe { (kernels.sum_of_squares)(x.as_ptr(), n) };
            assert_dot(actual, x.iter().map(|&x| (x, x)), &format!("{isa} n {n}"));
        }
    }
}

#[test]
fn silu_is_right_from_end_to_end_of_the_range() {
    for (isa, kernels) in tables() {
        let num_rows = 11;
        for scale in [1.0, 30.0, 200.0] {
            let x: Vec<f32> = random(num_rows * 32, 5).iter().map(|x| x * scale).collect();
            let mut out = vec![f32::NAN; num_rows * 16];
            // SAFETY: input rows have 32 elements, output rows 16.
            unsafe { (kernels.silu_mul)(x.as_ptr(), num_rows, out.as_mut_ptr()) };
            for (i, &actual) in out.iter().enumerate() {
                let (gate, up) = (x[i / 16 * 32 + i % 16], x[i / 16 * 32 + 16 + i % 16]);
                let gate = f64::from(gate);
                let expected = gate / (1.0 + (-gate).exp()) * f64::from(up);
                let error = (f64::from(actual) - expected).abs();
                assert!(
                    error <= 4e-7 * expected.abs() + 1e-30,
                    "{isa}: silu({gate}) * {up} is {expected}, not {actual}"
                );
            }
        }
    }
}

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
                let stride = head_dim.next_multiple_of(ATTENTION_LANES);
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
                            stride,
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

#[test]
fn read_reaches_every_line() {
    for (isa, kernels) in tables() {
        let mut bytes = vec![0u64; 4 * 4096 / 8];
        // SAFETY: the pointer and the length are those of `bytes`.
        let read = |bytes: &[u64], fetch_ahead| unsafe {
            (kernels.read)(bytes.as_ptr().cast(), bytes.len() * 8, fetch_ahead)
        };
        let nothing = read(&bytes, false);
        for line in 0..bytes.len() / 8 {
            bytes[line * 8] = 1;
            for fetch_ahead in [false, true] {
                let changed = read(&bytes, fetch_ahead);
                assert_ne!(changed, nothing, "{isa}: line {line}");
            }
            bytes[line * 8] = 0;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn each_line_is_fetched_once() {
    let start = 1 << 20;
    let mut lines: Vec<usize> = (0..1024)
        .map(|line| line_ahead((start + line * 64) as *const u8) as usize)
        .collect();
    lines.sort_unstable();
    let expected: Vec<usize> = (0..1024).map(|line| start + 16384 + line * 64).collect();
    assert_eq!(lines, expected);
}

fn tables() -> Vec<(Isa, &'static Kernels)> {
    let isas = Isa::ALL.into_iter();
    isas.filter_map(|isa| Some((isa, kernels(isa)?))).collect()
}

/// Elements in some format, and their values.
struct Elements {
    /// The bytes of the elements, aligned for every format.
    bytes: Vec<u64>,
    values: Vec<f32>,
}

impl Elements {
    fn new(dtype: DType, len: usize, seed: u64) -> Self {
        let mut values = random(len, seed);
        let mut bytes = Vec::new();
        for value in &mut values {
            match dtype {
                DType::F32 => bytes.extend(value.to_ne_bytes()),
                DType::Bf16 => {
                    bytes.extend(bf16::from_f32(*value).to_ne_bytes());
                    *value = bf16::from_f32(*value).to_f32();
                }
                DType::F16 => {
                    bytes.extend(f16::from_f32(*value).to_ne_bytes());
                    *value = f16::from_f32(*value).to_f32();
                }
            }
        }
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let words = bytes.as_chunks::<8>().0;
        Self {
            bytes: words.iter().map(|word| u64::from_ne_bytes(*word)).collect(),
            values,
        }
    }
}

impl Elements {
    fn of_kv(format: KvFormat, len: usize, seed: u64) -> Self {
        if let KvFormat::Float(dtype) = format {
            return Self::new(dtype, len, seed);
        }
        let bytes = integers(len.next_multiple_of(8), seed);
        let words = bytes.as_chunks::<8>().0;
        Self {
            bytes: words
                .iter()
                .map(|word| u64::from_ne_bytes(word.map(|byte| byte as u8)))
                .collect(),
            values: bytes.into_iter().map(f32::from).collect(),
        }
    }
}

/// Pseudo-random integers from -127 to 127.
fn integers(len: usize, seed: u64) -> Vec<i8> {
    let scaled = |x: f32| (x * 160.0).clamp(-127.0, 127.0) as i8;
    random(len, seed).into_iter().map(scaled).collect()
}

/// Pseudo-random numbers between -1 and 1.
fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn assert_dot(actual: f32, terms: impl Iterator<Item = (f32, f32)>, what: &str) {
    let (mut sum, mut magnitude) = (0.0, 0.0);
    for (a, b) in terms {
        let product = f64::from(a) * f64::from(b);
        sum += product;
        magnitude += product.abs();
    }
    let error = (f64::from(actual) - sum).abs();
    assert!(
        error <= 2e-6 * magnitude,
        "{what}: {actual}, expected {sum}"
    );
}

fn assert_near(actual: f32, expected: f64, what: &str) {
    let error = (f64::from(actual) - expected).abs();
    // Numbers below e^-87.3 count as 0.
    let tolerance = 4e-7 * expected + 1.3e-38;
    assert!(error <= tolerance, "{what}: {actual}, expected {expected}");
}
