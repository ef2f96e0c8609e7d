//! GEMM with group-wise scaled weights in plain Rust.

use half::f16;

use crate::kernels::grouped::{
    CHUNK_K, GroupedShape, GroupedTile, LANE_F16_BYTES, RAISED_LEVELS, SummedRows,
};
use crate::kernels::{INT8_TILE_K, PANEL_LANES};

/// # Safety
/// See `GroupedGemm`.
pub unsafe fn gemm(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    _fetch_ahead: bool,
) {
    for GroupedTile { rows, out } in tiles {
        // SAFETY: the caller upholds the contract.
        unsafe { gemm_tile(rows, panel, shape, *out) };
    }
}

unsafe fn gemm_tile(rows: &SummedRows, panel: *const u8, shape: GroupedShape, out: *mut f32) {
    for row in 0..rows.num_rows {
        let mut acc = [0.0_f32; PANEL_LANES];
        for group in 0..shape.num_groups() {
            let chunks = shape.chunks(group);
            let mut sums = [0_i32; PANEL_LANES];
            let mut row_sum = 0;
            // SAFETY: the group belongs to the panel, and the rows have its chunks.
            let head = unsafe {
                let head = panel.add(group * shape.group_bytes());
                for (i, chunk) in chunks.enumerate() {
                    let x = *rows.chunk(chunk, row).cast::<[i8; CHUNK_K]>();
                    row_sum += *rows.sums(chunk, row);
                    let lines = head.add(shape.head_bytes() + i * shape.chunk_bytes());
                    match (shape.bits, shape.is_fp4) {
                        (4, false) => add_halves(&x, &*lines.cast(), &mut sums, i32::from),
                        (4, true) => add_halves(&x, &*lines.cast(), &mut sums, level),
                        _ => add_bytes(&x, &*lines.cast(), &mut sums),
                    }
                }
                head
            };
            // SAFETY: the group begins with the lanes' scales, and with their minimums if it has any.
            unsafe {
                if shape.has_minimum {
                    let minimums = lanes_of_f16(head.add(LANE_F16_BYTES));
                    let scales = lanes_of_f16(head);
                    for lane in 0..PANEL_LANES {
                        acc[lane] += sums[lane] as f32 * scales[lane];
                        acc[lane] += row_sum as f32 * minimums[lane];
                    }
                } else {
                    let scales = lanes_of_f16(head);
                    for lane in 0..PANEL_LANES {
                        acc[lane] += (sums[lane] - shape.middle() * row_sum) as f32 * scales[lane];
                    }
                }
            }
        }
        // SAFETY: `out` has 32 elements for each row.
        unsafe {
            *out.add(row * PANEL_LANES).cast::<[f32; PANEL_LANES]>() = acc;
        }
    }
}

/// A pair of cache lines, `[half of the lanes][lane][four bytes]`.
type Line = [[[u8; 4]; 16]; 2];

fn level(code: u8) -> i32 {
    i32::from(RAISED_LEVELS[usize::from(code)])
}

fn add_halves(
    x: &[i8; CHUNK_K],
    lines: &[Line; CHUNK_K / 8],
    sums: &mut [i32; PANEL_LANES],
    weight: impl Fn(u8) -> i32,
) {
    for (x, line) in x.as_chunks::<8>().0.iter().zip(lines) {
        for (bytes, sum) in line.as_flattened().iter().zip(&mut *sums) {
            for (k, byte) in bytes.iter().enumerate() {
                *sum += i32::from(x[k]) * weight(byte & 15);
                *sum += i32::from(x[4 + k]) * weight(byte >> 4);
            }
        }
    }
}

fn add_bytes(x: &[i8; CHUNK_K], lines: &[Line; CHUNK_K / 4], sums: &mut [i32; PANEL_LANES]) {
    for (x, line) in x.as_chunks::<4>().0.iter().zip(lines) {
        for (bytes, sum) in line.as_flattened().iter().zip(&mut *sums) {
            for (x, byte) in x.iter().zip(bytes) {
                *sum += i32::from(*x) * i32::from(*byte);
            }
        }
    }
}

unsafe fn lanes_of_f16(at: *const u8) -> [f32; PANEL_LANES] {
    // SAFETY: the caller promises 32 values.
    let bits = unsafe { at.cast::<[u16; PANEL_LANES]>().read_unaligned() };
    bits.map(|bits| f16::from_bits(bits).to_f32())
}

const _: () = assert!(INT8_TILE_K.is_multiple_of(CHUNK_K));
