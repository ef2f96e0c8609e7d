//! Weights in groups, in AVX-512 with VNNI: sums of four products of unsigned bytes, or halves of
//! bytes, and bytes.

use std::arch::x86_64::*;

use super::grouped::{GroupedShape, GroupedTile, LANE_F16_BYTES, SummedRows, chunk_bytes, middle};
use super::{INT8_TILE_K, PANEL_LANES, grouped_avx2, with_rows};

/// Rows whose sums stay in registers.
const MAX_ROWS: usize = 6;

/// # Safety
/// See [`super::grouped::GroupedGemm`].
pub unsafe fn gemm(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
) {
    // SAFETY: the caller's promise, passed on; sums are exact, and what is done to them is the
    // same, so that both give the same.
    unsafe {
        if !is_x86_feature_detected!("avx512vnni") {
            return grouped_avx2::gemm(tiles, panel, shape, fetch_ahead);
        }
        for (index, GroupedTile { rows, out }) in tiles.iter().enumerate() {
            let num_parts = rows.num_rows.div_ceil(MAX_ROWS);
            for part in 0..num_parts {
                let first = part * rows.num_rows / num_parts;
                let end = (part + 1) * rows.num_rows / num_parts;
                let call = Part {
                    rows,
                    first,
                    panel,
                    shape,
                    requests: match fetch_ahead && index == 0 {
                        false => Ahead::Nothing,
                        true if num_parts == 1 => Ahead::Chunks,
                        true => Ahead::slice(panel, shape, part, num_parts),
                    },
                    out: out.add(first * PANEL_LANES),
                };
                with_rows!(end - first, M in [1 2 3 4 5 6],
                match (shape.bits, shape.has_minimum) {
                    (4, false) => call.run::<M, 4, false>(),
                    (4, true) => call.run::<M, 4, true>(),
                    _ => call.run::<M, 8, false>(),
                });
            }
        }
    }
}

/// Some rows of a tile times a panel.
struct Part<'a> {
    rows: &'a SummedRows,
    first: usize,
    panel: *const u8,
    shape: GroupedShape,
    requests: Ahead,
    out: *mut f32,
}

/// What rows ask for while they are multiplied.
#[derive(Clone, Copy)]
enum Ahead {
    Nothing,
    /// For each chunk as many lines behind it, of this panel and of the next.
    Chunks,
    /// Some of the next panel's lines, for the others ask for the rest: so many for each chunk.
    Slice {
        first: *const u8,
        num_lines: usize,
    },
}

impl Ahead {
    fn slice(panel: *const u8, shape: GroupedShape, part: usize, num_parts: usize) -> Self {
        let num_lines = (shape.panel_bytes() / 64).div_ceil(num_parts * shape.num_chunks);
        let skipped = part * shape.num_chunks * num_lines * 64;
        Self::Slice {
            first: panel.wrapping_add(shape.panel_bytes() + skipped),
            num_lines,
        }
    }

    /// Beside the lines of a chunk.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn ask<const BITS: usize>(self, chunk: usize, lines: *const u8) {
        match self {
            Self::Nothing => {}
            Self::Chunks => fetch_chunk::<BITS>(lines),
            Self::Slice { first, num_lines } => {
                for line in 0..num_lines {
                    let line = first.wrapping_add((chunk * num_lines + line) * 64);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
            }
        }
    }
}

impl Part<'_> {
    /// # Safety
    /// There are M rows from the first on, of which `out` has as many.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
    unsafe fn run<const M: usize, const BITS: usize, const HAS_MINIMUM: bool>(&self) {
        // SAFETY: groups of the panel, and what the rows have for their chunks.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); 2]; M];
            for group in 0..self.shape.num_groups() {
                let group = Group::<M, BITS, HAS_MINIMUM> {
                    rows: self.rows,
                    first: self.first,
                    chunk: group * self.shape.group_chunks,
                    head: self.panel.add(group * self.shape.group_bytes()),
                    requests: self.requests,
                };
                // A number that is known beforehand keeps what is summed in registers.
                match self.shape.num_chunks - group.chunk {
                    4.. if self.shape.group_chunks == 4 => group.add(4, &mut acc),
                    2.. if self.shape.group_chunks == 2 => group.add(2, &mut acc),
                    1.. if self.shape.group_chunks == 1 => group.add(1, &mut acc),
                    fewer => group.add(fewer, &mut acc),
                }
            }
            for r in 0..M {
                _mm512_storeu_ps(self.out.add(r * PANEL_LANES), acc[r][0]);
                _mm512_storeu_ps(self.out.add(r * PANEL_LANES + 16), acc[r][1]);
            }
        }
    }
}

struct Group<'a, const M: usize, const BITS: usize, const HAS_MINIMUM: bool> {
    rows: &'a SummedRows,
    /// Of M rows.
    first: usize,
    chunk: usize,
    head: *const u8,
    requests: Ahead,
}

impl<const M: usize, const BITS: usize, const HAS_MINIMUM: bool> Group<'_, M, BITS, HAS_MINIMUM> {
    /// # Safety
    /// The group has so many chunks.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
    unsafe fn add(&self, num_chunks: usize, acc: &mut [[__m512; 2]; M]) {
        let head_bytes = LANE_F16_BYTES * (1 + usize::from(HAS_MINIMUM));
        // SAFETY: the caller's promise, of the rows too; prefetches may name any address.
        unsafe {
            let mut row_sums = [0; M];
            for (r, sum) in row_sums.iter_mut().enumerate() {
                for chunk in 0..num_chunks {
                    *sum += *self.rows.sums(self.chunk + chunk, self.first + r);
                }
            }
            let start = |r: usize| match HAS_MINIMUM {
                true => _mm512_setzero_si512(),
                false => _mm512_set1_epi32(-middle(BITS) * row_sums[r]),
            };
            let mut sums: [[__m512i; 2]; M] = std::array::from_fn(|r| [start(r); 2]);
            // Of every second quad, so that fewer sums wait for each other.
            let mut odd_sums = [[_mm512_setzero_si512(); 2]; M];
            for chunk in 0..num_chunks {
                let lines = self.head.add(head_bytes + chunk * chunk_bytes(BITS));
                let x = self.rows.chunk(self.chunk + chunk, self.first);
                self.requests.ask::<BITS>(self.chunk + chunk, lines);
                for p in 0..4 {
                    for (odd, lines) in quads::<BITS>(lines, p).into_iter().enumerate() {
                        let sums = if M <= 2 && odd == 1 {
                            &mut odd_sums
                        } else {
                            &mut sums
                        };
                        for r in 0..M {
                            let x = x.add(r * INT8_TILE_K + p * 8 + odd * 4).cast::<i32>();
                            let x = _mm512_set1_epi32(x.read_unaligned());
                            for h in 0..2 {
                                sums[r][h] = _mm512_dpbusd_epi32(sums[r][h], lines[h], x);
                            }
                        }
                    }
                }
            }
            for h in 0..2 {
                let scale = load_f16(self.head.add(h * 32));
                for r in 0..M {
                    let sum = match M {
                        ..=2 => _mm512_add_epi32(sums[r][h], odd_sums[r][h]),
                        _ => sums[r][h],
                    };
                    acc[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[r][h]);
                    if HAS_MINIMUM {
                        let minimum = load_f16(self.head.add(LANE_F16_BYTES + h * 32));
                        let row_sum = _mm512_set1_ps(row_sums[r] as f32);
                        acc[r][h] = _mm512_fmadd_ps(row_sum, minimum, acc[r][h]);
                    }
                }
            }
        }
    }
}

/// Quads `2 p` and `2 p + 1`, a byte each, of both halves of the lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn quads<const BITS: usize>(lines: *const u8, p: usize) -> [[__m512i; 2]; 2] {
    let load = |line: usize| {
        // SAFETY: the caller vouches for a chunk.
        unsafe { _mm512_loadu_si512(lines.add(line * 64).cast()) }
    };
    if BITS == 8 {
        return [
            [load(p * 4), load(p * 4 + 1)],
            [load(p * 4 + 2), load(p * 4 + 3)],
        ];
    }
    let low_half = _mm512_set1_epi8(15);
    let [a, b] = [load(p * 2), load(p * 2 + 1)];
    [
        [_mm512_and_si512(a, low_half), _mm512_and_si512(b, low_half)],
        [
            _mm512_and_si512(_mm512_srli_epi16::<4>(a), low_half),
            _mm512_and_si512(_mm512_srli_epi16::<4>(b), low_half),
        ],
    ]
}

/// As many lines as a chunk has, as many of each of four pages, as [`super::line_ahead`] would name them.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch_chunk<const BITS: usize>(lines: *const u8) {
    const PAGES: usize = 4;
    let in_block = lines as usize % (PAGES * 4096);
    let ahead = lines.wrapping_add(PAGES * 4096 - in_block + in_block / PAGES);
    for page in 0..PAGES {
        for line in 0..chunk_bytes(BITS) / 64 / PAGES {
            let line = ahead.wrapping_add(page * 4096 + line * 64);
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
    }
}

/// 16 consecutive ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn load_f16(at: *const u8) -> __m512 {
    // SAFETY: the caller vouches for them.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}
