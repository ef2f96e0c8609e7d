//! 4-bit weights in AVX-512 with VNNI: sums of four products of unsigned halves of bytes and bytes.

use std::arch::x86_64::*;

use super::int4::{CHUNK_BYTES, Int4Rows, Int4Shape, Int4Tile, LANE_F16_BYTES, MIDDLE};
use super::{INT8_TILE_K, PANEL_LANES, int4_avx2, with_rows};

/// Rows whose sums stay in registers.
const MAX_ROWS: usize = 6;

/// # Safety
/// See [`super::int4::Int4Gemm`].
pub unsafe fn gemm(tiles: &[Int4Tile], panel: *const u8, shape: Int4Shape, fetch_ahead: bool) {
    // SAFETY: the caller's promise, passed on; sums are exact, and what is done to them is the
    // same, so that both give the same.
    unsafe {
        if !is_x86_feature_detected!("avx512vnni") {
            return int4_avx2::gemm(tiles, panel, shape, fetch_ahead);
        }
        for (index, Int4Tile { rows, out }) in tiles.iter().enumerate() {
            let num_parts = rows.num_rows.div_ceil(MAX_ROWS);
            for part in 0..num_parts {
                let first = part * rows.num_rows / num_parts;
                let end = (part + 1) * rows.num_rows / num_parts;
                let fetch_ahead = fetch_ahead && index + part == 0;
                let out = out.add(first * PANEL_LANES);
                with_rows!(end - first, M in [1 2 3 4 5 6], match shape.has_minimum {
                    false => gemm_rows::<M, false>(rows, first, panel, shape, fetch_ahead, out),
                    true => gemm_rows::<M, true>(rows, first, panel, shape, fetch_ahead, out),
                });
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
unsafe fn gemm_rows<const M: usize, const HAS_MINIMUM: bool>(
    rows: &Int4Rows,
    first: usize,
    panel: *const u8,
    shape: Int4Shape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    // SAFETY: groups of the panel, and what the rows have for their chunks; `out` has M rows of 32.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; M];
        for group in 0..shape.num_groups() {
            let group = Group::<M, HAS_MINIMUM> {
                rows,
                first,
                chunk: group * shape.group_chunks,
                head: panel.add(group * shape.group_bytes()),
                fetch_ahead,
            };
            // A number that is known beforehand keeps what is summed in registers.
            match shape.num_chunks - group.chunk {
                4.. if shape.group_chunks == 4 => group.add(4, &mut acc),
                2.. if shape.group_chunks == 2 => group.add(2, &mut acc),
                1.. if shape.group_chunks == 1 => group.add(1, &mut acc),
                fewer => group.add(fewer, &mut acc),
            }
        }
        for r in 0..M {
            _mm512_storeu_ps(out.add(r * PANEL_LANES), acc[r][0]);
            _mm512_storeu_ps(out.add(r * PANEL_LANES + 16), acc[r][1]);
        }
    }
}

struct Group<'a, const M: usize, const HAS_MINIMUM: bool> {
    rows: &'a Int4Rows,
    /// Of M rows.
    first: usize,
    chunk: usize,
    head: *const u8,
    fetch_ahead: bool,
}

impl<const M: usize, const HAS_MINIMUM: bool> Group<'_, M, HAS_MINIMUM> {
    /// # Safety
    /// The group has so many chunks.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
    unsafe fn add(&self, num_chunks: usize, acc: &mut [[__m512; 2]; M]) {
        let low_half = _mm512_set1_epi8(15);
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
                false => _mm512_set1_epi32(-MIDDLE * row_sums[r]),
            };
            let mut sums: [[__m512i; 2]; M] = std::array::from_fn(|r| [start(r); 2]);
            // Of the upper halves, so that fewer sums wait for each other.
            let mut high_sums = [[_mm512_setzero_si512(); 2]; M];
            for chunk in 0..num_chunks {
                let lines = self.head.add(head_bytes + chunk * CHUNK_BYTES);
                let x = self.rows.chunk(self.chunk + chunk, self.first);
                if self.fetch_ahead {
                    fetch_chunk(lines);
                }
                for p in 0..4 {
                    for h in 0..2 {
                        let bytes = _mm512_loadu_si512(lines.add((p * 2 + h) * 64).cast());
                        let low = _mm512_and_si512(bytes, low_half);
                        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low_half);
                        for r in 0..M {
                            let x = x.add(r * INT8_TILE_K + p * 8).cast::<i32>();
                            let first = _mm512_set1_epi32(x.read_unaligned());
                            let second = _mm512_set1_epi32(x.add(1).read_unaligned());
                            sums[r][h] = _mm512_dpbusd_epi32(sums[r][h], low, first);
                            let high_sums = if M <= 2 { &mut high_sums } else { &mut sums };
                            high_sums[r][h] = _mm512_dpbusd_epi32(high_sums[r][h], high, second);
                        }
                    }
                }
            }
            for h in 0..2 {
                let scale = load_f16(self.head.add(h * 32));
                for r in 0..M {
                    let sum = match M {
                        ..=2 => _mm512_add_epi32(sums[r][h], high_sums[r][h]),
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

/// As many lines as a chunk has, two of each of four pages, as [`super::line_ahead`] would name them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn fetch_chunk(lines: *const u8) {
    const PAGES: usize = 4;
    let in_block = lines as usize % (PAGES * 4096);
    let ahead = lines.wrapping_add(PAGES * 4096 - in_block + in_block / PAGES);
    for page in 0..PAGES {
        for line in 0..CHUNK_BYTES / 64 / PAGES {
            let line = ahead.wrapping_add(page * 4096 + line * 64);
            // SAFETY: prefetches may name any address.
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
