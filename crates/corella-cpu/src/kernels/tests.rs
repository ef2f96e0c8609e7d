//! Compares every kernel of every instruction set of this machine with arithmetic in f64.

use corella_model::{DType, KvFormat};
use half::{bf16, f16};

use super::*;

mod elementwise;
mod gemm;
mod grouped;
mod row_attention;
mod tile_attention;
#[cfg(target_arch = "x86_64")]
mod tile_instructions;

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
                    // The sign of an entry is given by the bits that row and column have in common (Sylvester).
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
