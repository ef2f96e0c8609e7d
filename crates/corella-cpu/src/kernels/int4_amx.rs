//! 4-bit weights through AMX matrix tiles, for more than a few rows: a section of a panel is
//! written out as bytes, multiplied group by group, and the sums are scaled as in AVX-512.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::amx::{TileShape, apart, configure};
use super::avx512::first_lanes;
use super::int4::{CHUNK_BYTES, Int4Rows, Int4Shape, LANE_F16_BYTES, MIDDLE};
use super::int4_avx512::{self, load_f16};
use super::{INT8_TILE_K, MAX_MATRIX_ROWS, PANEL_LANES, line_ahead};

/// So many are faster without tiles.
const FEW_ROWS: usize = 6;
/// Chunks that are written out together, so that they are in the first-level cache when they are
/// multiplied: whole groups.
const SECTION_CHUNKS: usize = 8;
/// Of 16 lanes of a chunk, written out.
const TILE_BYTES: usize = CHUNK_BYTES;
const TILE_ROWS: usize = 16;

/// # Safety
/// See [`super::int4::Int4Gemm`].
pub unsafe fn gemm(
    rows: &Int4Rows,
    panel: *const u8,
    shape: Int4Shape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    // SAFETY: the caller's promise, passed on; the process may use tiles.
    unsafe {
        if rows.num_rows <= FEW_ROWS {
            return int4_avx512::gemm(rows, panel, shape, fetch_ahead, out);
        }
        // Counted in pairs of bytes.
        let k = if shape.group_chunks == 1 { 16 } else { 32 };
        configure(TileShape {
            num_rows: rows.num_rows,
            k,
        });
        match shape.has_minimum {
            false => gemm_sections::<false>(rows, panel, shape, fetch_ahead, out),
            true => gemm_sections::<true>(rows, panel, shape, fetch_ahead, out),
        }
    }
}

/// What is kept of a section while it is multiplied.
#[repr(C, align(64))]
struct Section {
    /// Bytes of lanes 0–15, chunk by chunk, then those of lanes 16–31.
    weights: [[[u8; TILE_BYTES]; SECTION_CHUNKS]; 2],
    /// Of two groups by turns.
    sums: [[[i32; 16]; TILE_ROWS]; 2],
    /// Of the rows' integers, group by group.
    row_sums: [[f32; MAX_MATRIX_ROWS]; SECTION_CHUNKS],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn gemm_sections<const HAS_MINIMUM: bool>(
    rows: &Int4Rows,
    panel: *const u8,
    shape: Int4Shape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    let mut section = MaybeUninit::<Section>::uninit();
    let section = section.as_mut_ptr();
    let groups_at_once = SECTION_CHUNKS / shape.group_chunks;
    let num_groups = shape.num_groups();
    // SAFETY: sections are of whole groups; extents are those of the caller's promise; `out` has
    // room for all rows of the tiles; prefetches may name any address.
    unsafe {
        (&raw mut (*section).sums).write_bytes(0, 1);
        (&raw mut (*section).row_sums).write_bytes(0, 1);
        for first in (0..num_groups).step_by(groups_at_once) {
            let groups = first..num_groups.min(first + groups_at_once);
            expand::<HAS_MINIMUM>(panel, shape, groups.clone(), fetch_ahead, section);
            if HAS_MINIMUM {
                sum_rows(rows, shape, groups.clone(), section);
            }
            let part = |index: usize| {
                let (half, first_row) = (index % 2, index / 2 * TILE_ROWS);
                Part {
                    rows,
                    panel,
                    shape,
                    groups: groups.clone(),
                    half,
                    first_row,
                    out: out.wrapping_add(first_row * PANEL_LANES + half * 16),
                }
            };
            let num_parts = 2 * rows.num_rows.div_ceil(TILE_ROWS);
            let mut turn = 0;
            part(0).multiply_group(0, turn, section);
            for index in 0..num_parts {
                let next = (index + 1 < num_parts).then(|| part(index + 1));
                let part = part(index);
                match rows.num_rows - part.first_row {
                    ..=8 => part.multiply::<8, HAS_MINIMUM>(next, &mut turn, section),
                    _ => part.multiply::<16, HAS_MINIMUM>(next, &mut turn, section),
                }
            }
        }
    }
}

/// Weights of some groups, as bytes in the order that tiles have.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn expand<const HAS_MINIMUM: bool>(
    panel: *const u8,
    shape: Int4Shape,
    groups: std::ops::Range<usize>,
    fetch_ahead: bool,
    section: *mut Section,
) {
    let low_half = _mm512_set1_epi8(15);
    let middle = _mm512_set1_epi8(if HAS_MINIMUM { 0 } else { MIDDLE as i8 });
    let mut chunk = 0;
    // SAFETY: groups of the panel, and no more chunks than the section has; prefetches may name
    // any address.
    unsafe {
        let weights = &mut (*section).weights;
        for group in groups {
            let head = panel.add(group * shape.group_bytes());
            if fetch_ahead {
                for line in (0..shape.head_bytes()).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(head.add(line)).cast());
                }
            }
            let mut line = head.add(shape.head_bytes());
            for _ in shape.chunks(group) {
                let to = [0, 1].map(|half: usize| (&raw mut weights[half][chunk]).cast::<u8>());
                for pair in 0..4 {
                    for to in to {
                        if fetch_ahead {
                            _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast());
                        }
                        let bytes = _mm512_loadu_si512(line.cast());
                        let low = _mm512_and_si512(bytes, low_half);
                        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low_half);
                        let to = to.add(pair * 128);
                        _mm512_store_si512(to.cast(), _mm512_sub_epi8(low, middle));
                        _mm512_store_si512(to.add(64).cast(), _mm512_sub_epi8(high, middle));
                        line = line.add(64);
                    }
                }
                chunk += 1;
            }
        }
        // The other half of the last tile, which meets zeros of the rows.
        if chunk % 2 == 1 {
            for half in weights {
                half[chunk] = [0; TILE_BYTES];
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn sum_rows(
    rows: &Int4Rows,
    shape: Int4Shape,
    groups: std::ops::Range<usize>,
    section: *mut Section,
) {
    for first_row in (0..rows.num_rows).step_by(16) {
        let mask = first_lanes(rows.num_rows - first_row);
        // SAFETY: the rows' chunks, and the section's groups.
        unsafe {
            let row_sums = &mut (*section).row_sums;
            for (group, row_sums) in groups.clone().zip(row_sums) {
                let mut sum = _mm512_setzero_si512();
                for chunk in shape.chunks(group) {
                    let sums = _mm512_maskz_loadu_epi32(mask, rows.sums(chunk, first_row));
                    sum = _mm512_add_epi32(sum, sums);
                }
                let to = row_sums.as_mut_ptr().add(first_row);
                _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum));
            }
        }
    }
}

/// Up to 16 rows and 16 lanes of a section.
struct Part<'a> {
    rows: &'a Int4Rows,
    panel: *const u8,
    shape: Int4Shape,
    groups: std::ops::Range<usize>,
    half: usize,
    first_row: usize,
    out: *mut f32,
}

impl Part<'_> {
    /// Adds to the first `R` rows of `out`, of which some may be none of ours; of the first section,
    /// writes them. While a group's sums are scaled, the tiles have the next one: `turn` says where
    /// the sums of the first group are, or will be, and then where those of the next part's.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
    unsafe fn multiply<const R: usize, const HAS_MINIMUM: bool>(
        &self,
        next: Option<Part<'_>>,
        turn: &mut usize,
        section: *mut Section,
    ) {
        // SAFETY: extents are those of the section, the panel's groups and `out`.
        unsafe {
            let mut acc = [_mm512_setzero_ps(); R];
            if self.groups.start > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(self.out.add(r * PANEL_LANES));
                }
            }
            for index in 0..self.groups.len() {
                if index + 1 < self.groups.len() {
                    self.multiply_group(index + 1, 1 - *turn, section);
                } else if let Some(next) = &next {
                    next.multiply_group(0, 1 - *turn, section);
                }
                let group = self.groups.start + index;
                let head = self.panel.add(group * self.shape.group_bytes());
                let scale = load_f16(head.add(self.half * 32));
                let sums = (&raw const (*section).sums[*turn]).cast::<i32>();
                *turn = 1 - *turn;
                for (r, acc) in acc.iter_mut().enumerate() {
                    let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.add(r * 16).cast()));
                    *acc = _mm512_fmadd_ps(sum, scale, *acc);
                }
                if HAS_MINIMUM {
                    let minimum = load_f16(head.add(LANE_F16_BYTES + self.half * 32));
                    let row_sums = (&raw const (*section).row_sums[index]).cast::<f32>();
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let sum = _mm512_set1_ps(*row_sums.add(self.first_row + r));
                        *acc = _mm512_fmadd_ps(sum, minimum, *acc);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(self.out.add(r * PANEL_LANES), *acc);
            }
        }
    }

    /// Exact sums of a group of the section, counted from its first.
    #[inline(always)]
    unsafe fn multiply_group(&self, index: usize, turn: usize, section: *mut Section) {
        let chunks = self.shape.chunks(self.groups.start + index);
        // SAFETY: tiles are configured for the rows and for a group's chunk, or for two; a group
        // of the section, and rows behind the first one.
        unsafe {
            let row = self.rows.chunk(chunks.start, self.first_row);
            let weights = &raw const (*section).weights[self.half][index * self.shape.group_chunks];
            let sums = &raw mut (*section).sums[turn];
            macro_rules! multiply {
                ($sums:literal, $rows:literal) => {
                    asm!(
                        concat!("tilezero ", $sums),
                        "2:",
                        apart!(concat!("tileloadd ", $rows, ", [{row} + {line}]")),
                        apart!("tileloadd tmm6, [{weights} + {line}]"),
                        apart!(concat!("tdpbssd ", $sums, ", ", $rows, ", tmm6")),
                        "add {row}, {block_bytes}", "add {weights}, 1024", "dec {n}", "jnz 2b",
                        concat!("tilestored [{sums} + {line}], ", $sums),
                        row = inout(reg) row => _,
                        weights = inout(reg) weights => _,
                        n = inout(reg) chunks.len().div_ceil(2) => _,
                        block_bytes = in(reg) self.rows.num_rows * INT8_TILE_K,
                        line = in(reg) 64_usize,
                        sums = in(reg) sums,
                        out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                        options(nostack),
                    )
                };
            }
            if self.first_row == 0 {
                multiply!("tmm0", "tmm4");
            } else {
                multiply!("tmm2", "tmm5");
            }
        }
    }
}

const _: () = {
    assert!(MAX_MATRIX_ROWS == 2 * TILE_ROWS && INT8_TILE_K == 64);
    // A tile of two chunks.
    assert!(2 * TILE_BYTES == 1024);
};
