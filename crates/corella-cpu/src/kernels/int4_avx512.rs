//! 4-bit weights in AVX-512 with VNNI: sums of four products of unsigned halves of bytes and bytes.

use std::arch::x86_64::*;

use super::int4::{CHUNK_BYTES, Int4Rows, Int4Shape, LANE_F16_BYTES};
use super::{INT8_TILE_K, PANEL_LANES, int4_avx2, line_ahead, with_rows};

/// Rows whose sums stay in registers.
const MAX_ROWS: usize = 6;

/// # Safety
/// See [`super::int4::Int4Gemm`].
pub unsafe fn gemm(
    rows: &Int4Rows,
    panel: *const u8,
    shape: Int4Shape,
    fetch_ahead: bool,
    out: *mut f32,
) {
    // SAFETY: the caller's promise, passed on; sums are exact, and what is done to them is the
    // same, so that both give the same.
    unsafe {
        if !is_x86_feature_detected!("avx512vnni") {
            return int4_avx2::gemm(rows, panel, shape, fetch_ahead, out);
        }
        let num_parts = rows.num_rows.div_ceil(MAX_ROWS);
        for part in 0..num_parts {
            let first = part * rows.num_rows / num_parts;
            let end = (part + 1) * rows.num_rows / num_parts;
            let fetch_ahead = fetch_ahead && part == 0;
            let out = out.add(first * PANEL_LANES);
            with_rows!(end - first, M in [1 2 3 4 5 6], match shape.has_minimum {
                false => gemm_rows::<M, false>(rows, first, panel, shape, fetch_ahead, out),
                true => gemm_rows::<M, true>(rows, first, panel, shape, fetch_ahead, out),
            });
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
    let low_half = _mm512_set1_epi8(15);
    // SAFETY: groups of the panel, and what the rows have for their chunks; `out` has M rows of 32;
    // prefetches may name any address.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; M];
        for group in 0..shape.num_groups() {
            let head = panel.add(group * shape.group_bytes());
            let mut lines = head.add(shape.head_bytes());
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(head).cast());
                if HAS_MINIMUM {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(head.add(LANE_F16_BYTES)).cast());
                }
            }
            let mut sums = [[_mm512_setzero_si512(); 2]; M];
            let mut row_sums = [0; M];
            for chunk in shape.chunks(group) {
                for r in 0..M {
                    row_sums[r] += *rows.sums(chunk, first + r);
                }
                let x = rows.chunk(chunk, first);
                for p in 0..4 {
                    for h in 0..2 {
                        let line = lines.add((p * 2 + h) * 64);
                        if fetch_ahead {
                            _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast());
                        }
                        let bytes = _mm512_loadu_si512(line.cast());
                        let low = _mm512_and_si512(bytes, low_half);
                        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low_half);
                        for r in 0..M {
                            let x = x.add(r * INT8_TILE_K + p * 8).cast::<i32>();
                            let first = _mm512_set1_epi32(x.read_unaligned());
                            let second = _mm512_set1_epi32(x.add(1).read_unaligned());
                            sums[r][h] = _mm512_dpbusd_epi32(sums[r][h], low, first);
                            sums[r][h] = _mm512_dpbusd_epi32(sums[r][h], high, second);
                        }
                    }
                }
                lines = lines.add(CHUNK_BYTES);
            }
            for h in 0..2 {
                let scale = load_f16(head.add(h * 32));
                for r in 0..M {
                    let mut sum = sums[r][h];
                    if !HAS_MINIMUM {
                        let middle = _mm512_slli_epi32::<3>(_mm512_set1_epi32(row_sums[r]));
                        sum = _mm512_sub_epi32(sum, middle);
                    }
                    acc[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[r][h]);
                    if HAS_MINIMUM {
                        let minimum = load_f16(head.add(LANE_F16_BYTES + h * 32));
                        let row_sum = _mm512_set1_ps(row_sums[r] as f32);
                        acc[r][h] = _mm512_fmadd_ps(row_sum, minimum, acc[r][h]);
                    }
                }
            }
        }
        for r in 0..M {
            _mm512_storeu_ps(out.add(r * PANEL_LANES), acc[r][0]);
            _mm512_storeu_ps(out.add(r * PANEL_LANES + 16), acc[r][1]);
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
