//! Tests of matrix products.

use corella_model::DType;
use half::bf16;

use super::super::*;
use super::{Elements, assert_dot, integers, random, tables};

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Every kind of prefetch. The last one names memory that must not be read.
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
            // The panel is aligned, and zero beyond k, like panels in a region.
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
        // SAFETY: the caller upholds the contract, and there is room for the sums and the outputs.
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
            // Some integers are the largest possible, so that anything narrower than 32 bits would overflow.
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
