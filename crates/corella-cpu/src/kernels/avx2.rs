//! Kernels for AVX2 with FMA and F16C: vectors of 8 f32, fused multiply-add, tiles of 6 rows.

mod attention;
pub mod grouped;

use std::arch::x86_64::*;

use corella_model::Activation;

use self::attention::{scores, softmax_block, values};
use super::{
    BF16, ByFormat, ByKvFormat, F16, F32, INT8, INT8_TILE_K, Int8Rows, Kernels, PANEL_LANES, Peak,
    Prefetch, QuantiseRow, element_size,
    elementwise::{self, elementwise},
    exp, line_ahead, sum_lanes, with_rows,
};

pub static KERNELS: Kernels = Kernels {
    tile_rows: 6,
    gemm: ByFormat {
        f32: gemm::<F32>,
        bf16: gemm::<BF16>,
        f16: gemm::<F16>,
    },
    tile_gemm: None,
    int8_gemm,
    grouped_gemm: grouped::gemm,
    quantise_row,
    quantise_groups,
    largest_bits,
    quantise,
    hadamard,
    scale_sums,
    scale_rows,
    sum_of_squares,
    weigh,
    moments,
    weigh_centred,
    norm_rotate,
    round,
    add_bias,
    add_lanes,
    silu_mul,
    activate,
    soft_cap,
    delta_rows,
    update_state,
    convolve,
    gate,
    low_rank_down,
    low_rank_up,
    scores: ByKvFormat {
        f32: scores::<F32>,
        bf16: scores::<BF16>,
        f16: scores::<F16>,
        int8: scores::<INT8>,
    },
    softmax_block,
    values: ByKvFormat {
        f32: values::<F32>,
        bf16: values::<BF16>,
        f16: values::<F16>,
        int8: values::<INT8>,
    },
    tile_attention: None,
    peak,
    peak_flops: 12 * 8 * 2,
    int8_peak: Some(INT8_PEAK),
    read,
};

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemm<const FORMAT: u8>(
    a: *const f32,
    num_rows: usize,
    panel: *const u8,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match num_rows {
            ..=3 => with_rows!(num_rows, M in [1 2 3],
                gemm_tile::<FORMAT, M, 2>(a, panel, 0, k, fetch_ahead, out)),
            _ => with_rows!(num_rows, M in [4 5 6], {
                gemm_tile::<FORMAT, M, 1>(a, panel, 0, k, fetch_ahead, out);
                gemm_tile::<FORMAT, M, 1>(a, panel, 1, k, false, out);
            }),
        }
    }
}

/// Computes `Q` quarters of the panel, from quarter `first` on. Quarter q is lanes 8q..8q+8 of each
/// of the two 16-lane halves.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemm_tile<const FORMAT: u8, const M: usize, const Q: usize>(
    a: *const f32,
    panel: *const u8,
    first: usize,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
) {
    let row_bytes = PANEL_LANES * element_size(FORMAT);
    // SAFETY: `a` has k * M elements, the panel k rows, `out` M rows of 32. Prefetches may name any address.
    unsafe {
        let mut acc = [[[_mm256_setzero_ps(); 2]; Q]; M];
        for i in 0..k {
            let row = panel.add(i * row_bytes);
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(row).cast());
                if FORMAT == F32 {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(row.add(64)).cast());
                }
            }
            for q in 0..Q {
                let [low, high] = load_panel_quarter::<FORMAT>(row, first + q);
                for r in 0..M {
                    let x = _mm256_set1_ps(*a.add(i * M + r));
                    acc[r][q][0] = _mm256_fmadd_ps(x, low, acc[r][q][0]);
                    acc[r][q][1] = _mm256_fmadd_ps(x, high, acc[r][q][1]);
                }
            }
        }
        for r in 0..M {
            for q in 0..Q {
                let out = out.add(r * PANEL_LANES + (first + q) * 8);
                _mm256_storeu_ps(out, acc[r][q][0]);
                _mm256_storeu_ps(out.add(16), acc[r][q][1]);
            }
        }
    }
}

/// Loads quarter q of a panel row: lanes 8q..8q+8 and 16+8q..24+8q.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_panel_quarter<const FORMAT: u8>(row: *const u8, q: usize) -> [__m256; 2] {
    // SAFETY: the caller promises one panel row.
    unsafe {
        match FORMAT {
            F32 => [
                _mm256_loadu_ps(row.add(q * 32).cast()),
                _mm256_loadu_ps(row.add(64 + q * 32).cast()),
            ],
            BF16 => {
                let pairs = _mm256_loadu_si256(row.add(q * 32).cast());
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                    _mm256_castsi256_ps(_mm256_and_si256(
                        pairs,
                        _mm256_set1_epi32(0xffff_0000_u32 as i32),
                    )),
                ]
            }
            _ => [
                load_lanes::<F16>(row.add(q * 16)),
                load_lanes::<F16>(row.add(32 + q * 16)),
            ],
        }
    }
}

/// Loads 8 consecutive elements as f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_lanes<const FORMAT: u8>(elements: *const u8) -> __m256 {
    // SAFETY: the caller promises 8 elements.
    unsafe {
        match FORMAT {
            F32 => _mm256_loadu_ps(elements.cast()),
            BF16 => {
                let halves = _mm_loadu_si128(elements.cast());
                let words = _mm256_cvtepu16_epi32(halves);
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
            }
            INT8 => {
                let bytes = _mm_loadl_epi64(elements.cast());
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
            }
            _ => _mm256_cvtph_ps(_mm_loadu_si128(elements.cast())),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn int8_gemm(
    Int8Rows { rows, num_rows, .. }: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut i32,
    out_bytes: usize,
) {
    for first in (0..num_rows).step_by(4) {
        let m = (num_rows - first).min(4);
        let (fetch_ahead, bytes) = (prefetch.is_ahead() && first == 0, num_rows * INT8_TILE_K);
        // SAFETY: the caller upholds the contract.
        unsafe {
            let (rows, out) = (
                rows.add(first * INT8_TILE_K),
                out.byte_add(first * out_bytes),
            );
            with_rows!(m, M in [1 2 3 4],
                int8_gemm_tile::<M>(rows, bytes, panel, num_blocks, fetch_ahead, out, out_bytes));
        }
    }
}

/// Computes M rows. With 3 or 4 rows, it takes the halves of the panel one after the other, so that
/// all sums stay in registers; with fewer, both together, so that memory is read line after line.
// Arguments: a kernel's operands stay in registers.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8_gemm_tile<const M: usize>(
    rows: *const u8,
    block_bytes: usize,
    panel: *const u8,
    num_blocks: usize,
    fetch_ahead: bool,
    out: *mut i32,
    out_bytes: usize,
) {
    // SAFETY: each block has 64 bytes of each row and 1,024 of each tile; `out` has M rows of 32.
    unsafe {
        let x = |block: usize| rows.add(block * block_bytes);
        let tile = |block: usize, half: usize| panel.add((block * 2 + half) * 1024);
        let store = |acc: [[__m256i; 2]; M], half: usize| {
            for (r, acc) in acc.into_iter().enumerate() {
                let out = out.byte_add(r * out_bytes).add(half * 16);
                _mm256_storeu_si256(out.cast(), acc[0]);
                _mm256_storeu_si256(out.add(8).cast(), acc[1]);
            }
        };
        let zeros = [[_mm256_setzero_si256(); 2]; M];
        if M <= 2 {
            let (mut low, mut high) = (zeros, zeros);
            for block in 0..num_blocks {
                add_int8_tile(&mut low, x(block), tile(block, 0), fetch_ahead);
                add_int8_tile(&mut high, x(block), tile(block, 1), fetch_ahead);
            }
            store(low, 0);
            store(high, 1);
            return;
        }
        for half in 0..2 {
            let mut acc = zeros;
            for block in 0..num_blocks {
                add_int8_tile(&mut acc, x(block), tile(block, half), fetch_ahead);
            }
            store(acc, half);
        }
    }
}

/// Multiplies the weights' magnitudes, as unsigned bytes, by rows with the weights' signs. The sum
/// of two such products always fits in 16 bits.
///
/// # Safety
/// Each row must have 64 bytes, and the tile 1,024.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_int8_tile<const M: usize>(
    acc: &mut [[__m256i; 2]; M],
    x: *const u8,
    tile: *const u8,
    fetch_ahead: bool,
) {
    let ones = _mm256_set1_epi16(1);
    for i in 0..16 {
        // SAFETY: the caller upholds the contract; prefetches may name any address.
        unsafe {
            let w = tile.add(i * 64);
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(w).cast());
            }
            for q in 0..2 {
                let w = _mm256_loadu_si256(w.add(q * 32).cast());
                let magnitude = _mm256_abs_epi8(w);
                for r in 0..M {
                    let x = x.add(r * INT8_TILE_K + i * 4).cast::<i32>();
                    let x = _mm256_sign_epi8(_mm256_set1_epi32(x.read_unaligned()), w);
                    let pairs = _mm256_maddubs_epi16(magnitude, x);
                    acc[r][q] = _mm256_add_epi32(acc[r][q], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sum_of_squares(x: *const f32, n: usize) -> f32 {
    // SAFETY: `x` has n elements; the last ones are read from a copy padded with zeros.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); 2];
        let mut i = 0;
        while i < n {
            let mut tail = [0.0; 16];
            let chunk = if n - i >= 16 {
                x.add(i)
            } else {
                std::ptr::copy_nonoverlapping(x.add(i), tail.as_mut_ptr(), n - i);
                tail.as_ptr()
            };
            for (h, sum) in sums.iter_mut().enumerate() {
                let v = _mm256_loadu_ps(chunk.add(h * 8));
                *sum = _mm256_fmadd_ps(v, v, *sum);
            }
            i += 16;
        }
        let mut lanes = [0.0; 16];
        _mm256_storeu_ps(lanes.as_mut_ptr(), sums[0]);
        _mm256_storeu_ps(lanes.as_mut_ptr().add(8), sums[1]);
        sum_lanes(&lanes)
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantise_row(row: QuantiseRow) -> i32 {
    // SAFETY: the caller upholds the contract.
    unsafe { elementwise::quantise_row(row) }
}

/// The vectors of kernels that have one source for all instruction sets.
type Lanes = __m256;

elementwise!("avx2,fma,f16c");

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn silu_mul(x: *const f32, num_rows: usize, out: *mut f32) {
    let one = _mm256_set1_ps(1.0);
    for row in 0..num_rows {
        for h in 0..2 {
            // SAFETY: rows of `x` have 32 elements, rows of `out` have 16.
            unsafe {
                let gate = _mm256_loadu_ps(x.add(row * 32 + h * 8));
                let up = _mm256_loadu_ps(x.add(row * 32 + 16 + h * 8));
                let denominator =
                    _mm256_add_ps(one, exp_lanes(_mm256_sub_ps(_mm256_setzero_ps(), gate)));
                let silu = _mm256_div_ps(gate, denominator);
                _mm256_storeu_ps(out.add(row * 16 + h * 8), _mm256_mul_ps(silu, up));
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp_lanes(x: __m256) -> __m256 {
    // This operand order keeps a NaN in `x`.
    let x = _mm256_min_ps(
        _mm256_set1_ps(exp::MAX),
        _mm256_max_ps(_mm256_set1_ps(exp::MIN), x),
    );
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(exp::LOG2_E),
    ));
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(exp::LN_2_HIGH), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(exp::LN_2_LOW), r);
    let mut p = _mm256_set1_ps(exp::COEFFICIENTS[0]);
    for c in &exp::COEFFICIENTS[1..] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
    }
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
    let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(
        _mm256_cvtps_epi32(n),
        _mm256_set1_epi32(127),
    ));
    _mm256_mul_ps(p, _mm256_castsi256_ps(exponent))
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn peak(iterations: usize) -> f32 {
    let x = _mm256_set1_ps(std::hint::black_box(0.999));
    let y = _mm256_set1_ps(std::hint::black_box(0.001));
    let mut acc = [_mm256_set1_ps(1.0); 12];
    for _ in 0..iterations {
        for a in &mut acc {
            *a = _mm256_fmadd_ps(*a, x, y);
        }
    }
    let mut sum = _mm256_setzero_ps();
    for a in acc {
        sum = _mm256_add_ps(sum, a);
    }
    _mm256_cvtss_f32(sum)
}

const NUM_SUMS: usize = 12;

pub const INT8_PEAK: Peak = Peak {
    run: int8_peak,
    ops: NUM_SUMS * 32 * 2,
};

/// Runs the fewest instructions that 32 products can take: one that multiplies and adds pairs, and an addition of its
/// 16-bit sums. 4-bit weights need little more; 8-bit weights widen their sums every time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8_peak(iterations: usize) {
    let factors = std::hint::black_box([_mm256_set1_epi8(1); 2]);
    let mut sums = [_mm256_setzero_si256(); NUM_SUMS];
    for _ in 0..iterations {
        for sum in &mut sums {
            // Each product depends on the one before, or the compiler would move it out of the loop.
            *sum = _mm256_add_epi16(_mm256_maddubs_epi16(*sum, factors[0]), factors[1]);
        }
    }
    std::hint::black_box(sums);
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn read(bytes: *const u8, len: usize, fetch_ahead: bool) -> u32 {
    let mut acc = [_mm256_setzero_si256(); 4];
    for offset in (0..len).step_by(64) {
        // SAFETY: the offset is inside `len` bytes; prefetches may name any address.
        unsafe {
            let line = bytes.add(offset);
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast());
            }
            for half in 0..2 {
                let acc = &mut acc[offset / 64 % 2 * 2 + half];
                let read = _mm256_loadu_si256(line.add(half * 32).cast());
                *acc = _mm256_xor_si256(*acc, read);
            }
        }
    }
    let [a, b, c, d] = acc;
    let mixed = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    _mm256_extract_epi32::<0>(mixed) as u32
}
