//! GEMM with group-wise scaled weights through AMX tiles, for more than a few rows: a section of a panel is expanded to
//! signed bytes in tile order and multiplied group by group, and the sums are scaled as in the AVX-512 kernels.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::kernels::avx512::first_lanes;
use crate::kernels::avx512::grouped::{self, load_f16, quads};
use crate::kernels::grouped::{
    GroupedShape, GroupedTile, LANE_F16_BYTES, SummedRows, chunk_bytes, middle,
};
use crate::kernels::{INT8_TILE_K, MAX_MATRIX_ROWS, PANEL_LANES, line_ahead};

use super::tile::{TileShape, apart, configure};

/// Up to this many rows, the AVX-512 kernels are faster than tiles.
const FEW_ROWS: usize = 6;
/// The number of chunks (always whole groups) that are expanded together: with a tile's rows and
/// sums they fit into the first-level cache.
const SECTION_CHUNKS: usize = 16;
/// The size of a chunk's weights for 16 lanes, one byte each.
const HALF_CHUNK_BYTES: usize = chunk_bytes(8) / NUM_HALVES;
/// The number of rows, and of lanes, in a tile of sums.
const TILE_LEN: usize = 16;
const NUM_HALVES: usize = PANEL_LANES / TILE_LEN;

/// # Safety
/// See `GroupedGemm`.
pub unsafe fn gemm(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
) {
    // SAFETY: the caller upholds the contract, and the process may use tiles.
    unsafe {
        if let [tile] = tiles
            && tile.rows.num_rows <= FEW_ROWS
        {
            return grouped::gemm(tiles, panel, shape, fetch_ahead);
        }
        match (shape.bits, shape.has_minimum) {
            (4, false) if shape.is_fp4 => {
                gemm_sections::<4, true, false>(tiles, panel, shape, fetch_ahead)
            }
            (4, false) => gemm_sections::<4, false, false>(tiles, panel, shape, fetch_ahead),
            (4, true) => gemm_sections::<4, false, true>(tiles, panel, shape, fetch_ahead),
            _ => gemm_sections::<8, false, false>(tiles, panel, shape, fetch_ahead),
        }
    }
}

/// The buffers for one section of a panel.
#[repr(C, align(64))]
struct Section {
    /// Expanded weights: the chunks of lanes 0–15, then those of lanes 16–31.
    weights: [[[u8; HALF_CHUNK_BYTES]; SECTION_CHUNKS]; NUM_HALVES],
    /// Integer sums of two groups in turn, `[group % 2][half of the lanes][row][lane]`.
    sums: [[[[i32; TILE_LEN]; MAX_MATRIX_ROWS]; NUM_HALVES]; 2],
}

/// Computes all tiles section by section.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn gemm_sections<const BITS: usize, const IS_FP4: bool, const HAS_MINIMUM: bool>(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
) {
    let mut section = MaybeUninit::<Section>::uninit();
    let section = section.as_mut_ptr();
    // The lines prefetched during the expansion should arrive while the section is multiplied. With one tile the
    // multiplication is short, so sections are shorter.
    let section_chunks = if tiles.len() == 1 { 4 } else { SECTION_CHUNKS };
    let groups_at_once = section_chunks / shape.group_chunks;
    let num_groups = shape.num_groups();
    let mut configured_rows = 0;
    // SAFETY: sections consist of whole groups, and the caller promises the extents.
    unsafe {
        for tile in tiles {
            tile.out.write_bytes(0, tile.rows.num_rows * PANEL_LANES);
        }
        for first in (0..num_groups).step_by(groups_at_once) {
            let groups = first..num_groups.min(first + groups_at_once);
            expand::<BITS, IS_FP4, HAS_MINIMUM>(panel, shape, groups.clone(), fetch_ahead, section);
            for tile in tiles {
                let num_rows = tile.rows.num_rows;
                if configured_rows != num_rows {
                    // `TileShape` counts elements of two bytes. A tile's row has one or two chunks of 32 bytes.
                    let k = if shape.group_chunks == 1 { 16 } else { 32 };
                    configure(TileShape { num_rows, k });
                    configured_rows = num_rows;
                }
                multiply::<HAS_MINIMUM>(tile, panel, shape, groups.clone(), section);
            }
        }
    }
}

/// Expands the weights of some groups to bytes in tile order.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn expand<const BITS: usize, const IS_FP4: bool, const HAS_MINIMUM: bool>(
    panel: *const u8,
    shape: GroupedShape,
    groups: Range<usize>,
    fetch_ahead: bool,
    section: *mut Section,
) {
    let middle = _mm512_set1_epi8(match HAS_MINIMUM {
        true => 0,
        false => middle(BITS, IS_FP4) as i8,
    });
    let mut chunk = 0;
    // SAFETY: the groups belong to the panel, and have at most as many chunks as the section.
    unsafe {
        let weights = &mut (*section).weights;
        for group in groups {
            let head = panel.add(group * shape.group_bytes());
            if fetch_ahead {
                for line in (0..shape.head_bytes()).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(head.add(line)).cast());
                }
            }
            let mut lines = head.add(shape.head_bytes());
            for _ in shape.chunks(group) {
                let to = [0, 1].map(|half: usize| (&raw mut weights[half][chunk]).cast::<u8>());
                for p in 0..4 {
                    if fetch_ahead {
                        let first = lines.add(p * chunk_bytes(BITS) / 4);
                        for at in (0..chunk_bytes(BITS) / 4).step_by(64) {
                            _mm_prefetch::<_MM_HINT_T0>(line_ahead(first.add(at)).cast());
                        }
                    }
                    for (odd, halves) in quads::<BITS, IS_FP4>(lines, p).into_iter().enumerate() {
                        for (to, bytes) in to.into_iter().zip(halves) {
                            let to = to.add(p * 128 + odd * 64);
                            _mm512_store_si512(to.cast(), _mm512_sub_epi8(bytes, middle));
                        }
                    }
                }
                lines = lines.add(chunk_bytes(BITS));
                chunk += 1;
            }
        }
        // A tile holds two chunks. After an odd number of chunks, the second half of the last tile is multiplied by
        // zeros of the rows. It must be defined nevertheless.
        if chunk % 2 == 1 {
            for half in weights {
                half[chunk] = [0; HALF_CHUNK_BYTES];
            }
        }
    }
}

/// Adds a section's products to a tile's sums. While one group's sums are scaled, the tile unit
/// multiplies the next group.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn multiply<const HAS_MINIMUM: bool>(
    tile: &GroupedTile,
    panel: *const u8,
    shape: GroupedShape,
    groups: Range<usize>,
    section: *mut Section,
) {
    // SAFETY: the extents are those of the section, the panel's groups and `out`.
    unsafe {
        multiply_group(&tile.rows, shape, groups.clone(), 0, section);
        for index in 0..groups.len() {
            if index + 1 < groups.len() {
                multiply_group(&tile.rows, shape, groups.clone(), index + 1, section);
            }
            let head = panel.add((groups.start + index) * shape.group_bytes());
            let sums = (&raw const (*section).sums[index % 2]).cast::<i32>();
            scale_group(tile.rows.num_rows, sums, head, tile.out);
            if HAS_MINIMUM {
                let chunks = shape.chunks(groups.start + index);
                add_minimum(&tile.rows, chunks, head.add(LANE_F16_BYTES), tile.out);
            }
        }
    }
}

/// Adds a group's integer sums, times the group's scales, to the outputs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn scale_group(num_rows: usize, sums: *const i32, scales: *const u8, out: *mut f32) {
    for half in 0..NUM_HALVES {
        // SAFETY: there are scales for 16 lanes, and `num_rows` rows of sums and outputs.
        unsafe {
            let scale = load_f16(scales.add(half * TILE_LEN * 2));
            let sums = sums.add(half * MAX_MATRIX_ROWS * TILE_LEN);
            let out = out.add(half * TILE_LEN);
            for r in 0..num_rows {
                let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.add(r * TILE_LEN).cast()));
                let acc = out.add(r * PANEL_LANES);
                _mm512_storeu_ps(acc, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(acc)));
            }
        }
    }
}

/// Adds a group's minimums, times the sums of the rows' integers, to the outputs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn add_minimum(rows: &SummedRows, chunks: Range<usize>, minimums: *const u8, out: *mut f32) {
    let mut row_sums = [0.0_f32; MAX_MATRIX_ROWS];
    // SAFETY: the rows have these chunks, the panel has the minimums of 32 lanes, and `out` has the rows.
    unsafe {
        for first_row in (0..rows.num_rows).step_by(16) {
            let mask = first_lanes(rows.num_rows - first_row);
            let mut sum = _mm512_setzero_si512();
            for chunk in chunks.clone() {
                let sums = _mm512_maskz_loadu_epi32(mask, rows.sums(chunk, first_row));
                sum = _mm512_add_epi32(sum, sums);
            }
            let to = row_sums.as_mut_ptr().add(first_row);
            _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum));
        }
        let minimum = [0, 1].map(|half| load_f16(minimums.add(half * TILE_LEN * 2)));
        for (r, sum) in row_sums[..rows.num_rows].iter().enumerate() {
            let sum = _mm512_set1_ps(*sum);
            for (half, minimum) in minimum.into_iter().enumerate() {
                let acc = out.add(r * PANEL_LANES + half * TILE_LEN);
                _mm512_storeu_ps(acc, _mm512_fmadd_ps(sum, minimum, _mm512_loadu_ps(acc)));
            }
        }
    }
}

/// Computes the exact sums of a group of the section; `index` counts groups from the section's first group.
#[inline(always)]
unsafe fn multiply_group(
    rows: &SummedRows,
    shape: GroupedShape,
    groups: Range<usize>,
    index: usize,
    section: *mut Section,
) {
    let chunks = shape.chunks(groups.start + index);
    // SAFETY: tiles are configured for the rows and for one or two chunks, as the shape says. The
    // group belongs to the section.
    unsafe {
        let row = rows.chunk(chunks.start, 0);
        let weights = &raw const (*section).weights[0][index * shape.group_chunks];
        let sums = &raw mut (*section).sums[index % 2];
        if rows.num_rows > TILE_LEN {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                apart!("tileloadd tmm4, [{row} + {line}]"),
                apart!("tileloadd tmm6, [{weights} + {line}]"),
                apart!("tileloadd tmm7, [{weights} + {line} + {half_bytes}]"),
                apart!("tdpbssd tmm0, tmm4, tmm6"),
                apart!("tileloadd tmm5, [{row} + {line} + 1024]"),
                apart!("tdpbssd tmm1, tmm4, tmm7"),
                apart!("tdpbssd tmm2, tmm5, tmm6"),
                apart!("tdpbssd tmm3, tmm5, tmm7"),
                "add {row}, {block_bytes}", "add {weights}, 1024", "dec {n}", "jnz 2b",
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + 2048], tmm1",
                "tilestored [{sums} + {line} + 1024], tmm2",
                "tilestored [{sums} + {line} + 3072], tmm3",
                row = inout(reg) row => _,
                weights = inout(reg) weights => _,
                n = inout(reg) chunks.len().div_ceil(2) => _,
                block_bytes = in(reg) rows.num_rows * INT8_TILE_K,
                line = in(reg) 64_usize, half_bytes = const HALF_BYTES,
                sums = in(reg) sums,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1",
                "2:",
                apart!("tileloadd tmm4, [{row} + {line}]"),
                apart!("tileloadd tmm6, [{weights} + {line}]"),
                apart!("tdpbssd tmm0, tmm4, tmm6"),
                apart!("tileloadd tmm7, [{weights} + {line} + {half_bytes}]"),
                apart!("tdpbssd tmm1, tmm4, tmm7"),
                "add {row}, {block_bytes}", "add {weights}, 1024", "dec {n}", "jnz 2b",
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + 2048], tmm1",
                row = inout(reg) row => _,
                weights = inout(reg) weights => _,
                n = inout(reg) chunks.len().div_ceil(2) => _,
                block_bytes = in(reg) rows.num_rows * INT8_TILE_K,
                line = in(reg) 64_usize, half_bytes = const HALF_BYTES,
                sums = in(reg) sums,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

const HALF_BYTES: usize = SECTION_CHUNKS * HALF_CHUNK_BYTES;

const _: () = {
    assert!(MAX_MATRIX_ROWS == 2 * TILE_LEN && INT8_TILE_K == 64);
    // A tile holds two chunks of weights.
    assert!(2 * HALF_CHUNK_BYTES == 1024);
};
