//! GEMM with group-wise scaled weights in AVX-512 with VNNI, whose instruction sums four products
//! of an unsigned and a signed byte.

use std::arch::x86_64::*;

use crate::kernels::grouped::{
    GroupedShape, GroupedTile, LANE_F16_BYTES, RAISED_LEVELS, SummedRows, chunk_bytes, middle,
};
use crate::kernels::{INT8_TILE_K, PANEL_LANES, avx2, wants_prefetch, with_rows};

/// The largest number of rows whose sums stay in registers.
const MAX_ROWS: usize = 6;

/// Up to this number of rows, memory limits a Zen 4 core, and the core reads panels faster without prefetches. With six
/// rows of 4-bit weights, the prefetch of the next panel makes the core 1.28 times as fast.
const fn few_rows(bits: usize) -> usize {
    match bits {
        4 => 2,
        _ => 5,
    }
}

/// # Safety
/// See `GroupedGemm`.
pub unsafe fn gemm(
    tiles: &[GroupedTile],
    panel: *const u8,
    shape: GroupedShape,
    fetch_ahead: bool,
) {
    // SAFETY: the caller upholds the contract. Both kernels give the same results, because integer sums
    // are exact and the rest is computed in the same order.
    unsafe {
        if !is_x86_feature_detected!("avx512vnni") {
            return avx2::grouped::gemm(tiles, panel, shape, fetch_ahead);
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
                    prefetch: match index == 0
                        && (fetch_ahead || rows.num_rows > few_rows(shape.bits))
                    {
                        false => Ahead::Nothing,
                        true if num_parts == 1 && wants_prefetch() => Ahead::Chunks,
                        true => Ahead::slice(panel, shape, part, num_parts),
                    },
                    out: out.add(first * PANEL_LANES),
                };
                with_rows!(end - first, M in [1 2 3 4 5 6],
                match (shape.bits, shape.has_minimum) {
                    (4, false) if shape.is_fp4 => call.run::<M, 4, true, false>(),
                    (4, false) => call.run::<M, 4, false, false>(),
                    (4, true) => call.run::<M, 4, false, true>(),
                    _ => call.run::<M, 8, false, false>(),
                });
            }
        }
    }
}

/// The product of some rows of a tile and a panel.
struct Part<'a> {
    rows: &'a SummedRows,
    first: usize,
    panel: *const u8,
    shape: GroupedShape,
    prefetch: Ahead,
    out: *mut f32,
}

/// The prefetches of a kernel while it multiplies.
#[derive(Clone, Copy)]
enum Ahead {
    Nothing,
    /// Each chunk prefetches the lines of a later chunk, in this panel or in the next.
    Chunks,
    /// A slice of the next panel, `num_lines` per chunk. The other parts of the tile prefetch the rest.
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

    /// Issues the prefetches that go with a chunk, whose weights are at `lines`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn issue<const BITS: usize>(self, chunk: usize, lines: *const u8) {
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
    /// From the first row on there are M rows, and `out` has room for as many.
    unsafe fn run<
        const M: usize,
        const BITS: usize,
        const IS_FP4: bool,
        const HAS_MINIMUM: bool,
    >(
        &self,
    ) {
        // SAFETY: the caller upholds the contract. A constant number of chunks keeps the sums in registers.
        unsafe {
            match self.shape.group_chunks {
                1 => self.run_groups::<M, BITS, IS_FP4, HAS_MINIMUM, 1>(),
                2 => self.run_groups::<M, BITS, IS_FP4, HAS_MINIMUM, 2>(),
                4 => self.run_groups::<M, BITS, IS_FP4, HAS_MINIMUM, 4>(),
                chunks => unreachable!("there are no groups of {chunks} chunks"),
            }
        }
    }

    /// # Safety
    /// See `run`; a group has `CHUNKS` chunks.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
    unsafe fn run_groups<
        const M: usize,
        const BITS: usize,
        const IS_FP4: bool,
        const HAS_MINIMUM: bool,
        const CHUNKS: usize,
    >(
        &self,
    ) {
        // SAFETY: the groups belong to the panel, and the rows have their chunks.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); 2]; M];
            let at = |group: usize| Group::<M, BITS, IS_FP4, HAS_MINIMUM> {
                rows: self.rows,
                first: self.first,
                chunk: group * CHUNKS,
                head: self.panel.add(group * self.shape.group_bytes()),
                prefetch: self.prefetch,
            };
            let num_whole = self.shape.num_chunks / CHUNKS;
            for group in 0..num_whole {
                at(group).add(CHUNKS, &mut acc);
            }
            if CHUNKS > 1 && num_whole * CHUNKS < self.shape.num_chunks {
                let num_left = self.shape.num_chunks - num_whole * CHUNKS;
                at(num_whole).add(num_left, &mut acc);
            }
            for r in 0..M {
                _mm512_storeu_ps(self.out.add(r * PANEL_LANES), acc[r][0]);
                _mm512_storeu_ps(self.out.add(r * PANEL_LANES + 16), acc[r][1]);
            }
        }
    }
}

/// One group of a panel, to be multiplied by M rows.
struct Group<'a, const M: usize, const BITS: usize, const IS_FP4: bool, const HAS_MINIMUM: bool> {
    rows: &'a SummedRows,
    /// The first of the M rows.
    first: usize,
    /// The group's first chunk.
    chunk: usize,
    /// The start of the group in the panel.
    head: *const u8,
    prefetch: Ahead,
}

impl<const M: usize, const BITS: usize, const IS_FP4: bool, const HAS_MINIMUM: bool>
    Group<'_, M, BITS, IS_FP4, HAS_MINIMUM>
{
    /// Adds the group's products to `acc`. Always inlined: a call would keep `acc` in memory, and take up to 1.5 times
    /// as long.
    ///
    /// # Safety
    /// The group has `num_chunks` chunks, and the caller the instructions of `run_groups`.
    #[inline(always)]
    unsafe fn add(&self, num_chunks: usize, acc: &mut [[__m512; 2]; M]) {
        let head_bytes = LANE_F16_BYTES * (1 + usize::from(HAS_MINIMUM));
        // SAFETY: the caller upholds the contract, and the rows have these chunks. Prefetches may name any address.
        unsafe {
            let mut row_sums = [0; M];
            let mut sums = [[_mm512_setzero_si512(); 2]; M];
            for r in 0..M {
                for chunk in 0..num_chunks {
                    row_sums[r] += *self.rows.sums(self.chunk + chunk, self.first + r);
                }
                if !HAS_MINIMUM {
                    sums[r] = [_mm512_set1_epi32(-middle(BITS, IS_FP4) * row_sums[r]); 2];
                }
            }
            // With few rows, every second quad has sums of its own, so that fewer additions wait for each other.
            let mut odd_sums = [[_mm512_setzero_si512(); 2]; M];
            for chunk in 0..num_chunks {
                let lines = self.head.add(head_bytes + chunk * chunk_bytes(BITS));
                let x = self.rows.chunk(self.chunk + chunk, self.first);
                self.prefetch.issue::<BITS>(self.chunk + chunk, lines);
                for p in 0..4 {
                    for (odd, lines) in quads::<BITS, IS_FP4>(lines, p).into_iter().enumerate() {
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

/// Loads quads `2 p` and `2 p + 1` of a chunk, one byte per weight, for both halves of the lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn quads<const BITS: usize, const IS_FP4: bool>(
    lines: *const u8,
    p: usize,
) -> [[__m512i; 2]; 2] {
    let load = |line: usize| {
        // SAFETY: the caller promises a chunk.
        unsafe { _mm512_loadu_si512(lines.add(line * 64).cast()) }
    };
    if BITS == 8 {
        return [
            [load(p * 4), load(p * 4 + 1)],
            [load(p * 4 + 2), load(p * 4 + 3)],
        ];
    }
    let low_half = _mm512_set1_epi8(15);
    let lines = [load(p * 2), load(p * 2 + 1)];
    let low = lines.map(|line| _mm512_and_si512(line, low_half));
    let high = lines.map(|line| _mm512_and_si512(_mm512_srli_epi16::<4>(line), low_half));
    if !IS_FP4 {
        return [low, high];
    }
    // SAFETY: there are 16 levels.
    let levels = unsafe { _mm_loadu_si128(RAISED_LEVELS.as_ptr().cast()) };
    let levels = _mm512_broadcast_i32x4(levels);
    [low, high].map(|codes| codes.map(|codes| _mm512_shuffle_epi8(levels, codes)))
}

/// Prefetches as many lines as a chunk has, evenly from four pages, in the pattern of `line_ahead`.
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

/// Loads 16 consecutive f16 values as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn load_f16(at: *const u8) -> __m512 {
    // SAFETY: the caller promises 16 values.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}
