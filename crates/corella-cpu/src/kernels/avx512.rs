//! Kernels for AVX-512 (F, BW, DQ, VL): vectors of 16 f32, fused multiply-add, tiles of 14 rows.

mod attention;
pub mod grouped;

use std::arch::x86_64::*;

use corella_model::Activation;

use self::attention::{scores, softmax_block, values};
use super::{
    BF16, ByFormat, ByKvFormat, F16, F32, FEW_ROWS, INT8, INT8_TILE_K, Int8Rows, Kernels,
    PANEL_LANES, Peak, Prefetch, QuantiseRow, avx2, element_size, elementwise::elementwise, exp,
    grouped::CHUNK_K, in_steps, line_ahead, with_rows,
};

pub const KERNELS: Kernels = Kernels {
    tile_rows: 14,
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
    peak_flops: 24 * 16 * 2,
    int8_peak: Some(Peak {
        run: int8_peak,
        ops: NUM_SUMS * 16 * 8,
    }),
    read,
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
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
        with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
            gemm_tile::<FORMAT, M>(a, panel, k, fetch_ahead, out));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn gemm_tile<const FORMAT: u8, const M: usize>(
    a: *const f32,
    panel: *const u8,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
) {
    let row_bytes = PANEL_LANES * element_size(FORMAT);
    // SAFETY: `a` has k * M elements, the panel k rows, `out` M rows of 32. Prefetches may name any address.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; M];
        for i in 0..k {
            let row = panel.add(i * row_bytes);
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(row).cast());
                if FORMAT == F32 {
                    _mm_prefetch::<_MM_HINT_T0>(line_ahead(row.add(64)).cast());
                }
            }
            let [low, high] = load_panel_row::<FORMAT>(row);
            for r in 0..M {
                let x = _mm512_set1_ps(*a.add(i * M + r));
                acc[r][0] = _mm512_fmadd_ps(x, low, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(x, high, acc[r][1]);
            }
        }
        for r in 0..M {
            let out = out.add(r * PANEL_LANES);
            _mm512_storeu_ps(out, acc[r][0]);
            _mm512_storeu_ps(out.add(16), acc[r][1]);
        }
    }
}

/// Loads lanes 0–15 and 16–31 of a panel row as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn load_panel_row<const FORMAT: u8>(row: *const u8) -> [__m512; 2] {
    // SAFETY: the caller promises one panel row.
    unsafe {
        match FORMAT {
            F32 => [
                _mm512_loadu_ps(row.cast()),
                _mm512_loadu_ps(row.add(64).cast()),
            ],
            BF16 => {
                let pairs = _mm512_loadu_si512(row.cast());
                [
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
                    _mm512_castsi512_ps(_mm512_and_si512(
                        pairs,
                        _mm512_set1_epi32(0xffff_0000_u32 as i32),
                    )),
                ]
            }
            _ => [load_lanes::<F16>(row), load_lanes::<F16>(row.add(32))],
        }
    }
}

/// Loads 16 consecutive elements as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn load_lanes<const FORMAT: u8>(elements: *const u8) -> __m512 {
    // SAFETY: the caller promises 16 elements.
    unsafe {
        match FORMAT {
            F32 => _mm512_loadu_ps(elements.cast()),
            BF16 => {
                let halves = _mm256_loadu_si256(elements.cast());
                let words = _mm512_cvtepu16_epi32(halves);
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
            }
            INT8 => {
                let bytes = _mm_loadu_si128(elements.cast());
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
            }
            _ => _mm512_cvtph_ps(_mm256_loadu_si256(elements.cast())),
        }
    }
}

unsafe fn int8_gemm(
    rows: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut i32,
    out_bytes: usize,
) {
    // SAFETY: the caller upholds the contract. Both kernels give the same results, because sums are exact.
    unsafe {
        if !is_x86_feature_detected!("avx512vnni") {
            return avx2::int8_gemm(rows, panel, num_blocks, prefetch, out, out_bytes);
        }
        with_rows!(rows.num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
            int8_gemm_tile::<M>(rows, panel, num_blocks, prefetch, out, out_bytes));
    }
}

/// Computes M rows. The instruction takes one operand unsigned, so 128 is added to the weights, and
/// 128 times the sum of the row is subtracted from the result.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn int8_gemm_tile<const M: usize>(
    rows: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut i32,
    out_bytes: usize,
) {
    // SAFETY: each block has 64 bytes of each of the M rows, and two tiles of 1,024 bytes. `out` has M rows of 32.
    unsafe {
        let mut acc = [[_mm512_setzero_si512(); M]; 2];
        if M > FEW_ROWS {
            acc = add_int8_blocks(acc, rows.rows, panel, num_blocks, prefetch);
        } else if prefetch == Prefetch::Nothing {
            acc = add_int8_lines(acc, rows.rows, panel, num_blocks, Prefetch::Nothing);
        } else {
            acc = add_int8_lines(acc, rows.rows, panel, num_blocks, prefetch);
        }
        for r in 0..M {
            let raised = _mm512_set1_epi32(*rows.sums.add(r) * 128);
            let out = out.byte_add(r * out_bytes);
            _mm512_storeu_si512(out.cast(), _mm512_sub_epi32(acc[0][r], raised));
            _mm512_storeu_si512(out.add(16).cast(), _mm512_sub_epi32(acc[1][r], raised));
        }
    }
}

/// The number of cache lines in a tile of 8-bit integers.
const LINES: usize = INT8_TILE_K / 4;

/// Adds the products of M rows and blocks of weights, one line of both tiles of a block at a time.
///
/// # Safety
/// Each block has 64 bytes of each row, and 2,048 bytes of the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_int8_blocks<const M: usize>(
    mut acc: [[__m512i; M]; 2],
    rows: *const u8,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
) -> [[__m512i; M]; 2] {
    let others = prefetch.only_ahead();
    for block in 0..num_blocks {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let x = rows.add(block * M * INT8_TILE_K);
            let tiles = panel.add(block * 2048);
            for i in 0..LINES {
                let (low, high) = (tiles.add(i * 64), tiles.add(1024 + i * 64));
                prefetch.issue(low, block * LINES + i);
                others.issue(high, block * LINES + i);
                let (low, high) = (load_raised(low), load_raised(high));
                for r in 0..M {
                    let x = x.add(r * INT8_TILE_K + i * 4).cast::<i32>();
                    let x = _mm512_set1_epi32(x.read_unaligned());
                    acc[0][r] = _mm512_dpbusd_epi32(acc[0][r], low, x);
                    acc[1][r] = _mm512_dpbusd_epi32(acc[1][r], high, x);
                }
            }
        }
    }
    acc
}

/// Like `add_int8_blocks`, one line of one tile after the other.
///
/// # Safety
/// See `add_int8_blocks`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_int8_lines<const M: usize>(
    [mut low, mut high]: [[__m512i; M]; 2],
    rows: *const u8,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
) -> [[__m512i; M]; 2] {
    let lines = in_steps(LINES);
    for tile in 0..2 * num_blocks {
        let prefetch = prefetch.of_tile(tile);
        for line in lines.clone() {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let weights = panel.add((tile * LINES + line) * 64);
                prefetch.issue(weights, tile / 2 * LINES + line);
                let weights = load_raised(weights);
                for r in 0..M {
                    let x = rows.add((tile / 2 * M + r) * INT8_TILE_K + line * 4);
                    let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
                    low[r] = _mm512_dpbusd_epi32(low[r], weights, x);
                }
            }
        }
        (low, high) = (high, low);
    }
    [low, high]
}

/// Loads signed bytes and adds 128 to each, which makes them unsigned.
///
/// # Safety
/// At `bytes` there are 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load_raised(bytes: *const u8) -> __m512i {
    // SAFETY: the caller upholds the contract.
    let bytes = unsafe { _mm512_loadu_si512(bytes.cast()) };
    _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn sum_of_squares(x: *const f32, n: usize) -> f32 {
    // SAFETY: `x` has n elements, and the mask keeps the last load inside.
    unsafe {
        // Four sums, because each addition waits for the previous one of its sum.
        let mut sums = [_mm512_setzero_ps(); 4];
        let mut i = 0;
        while i < n {
            for (v, sum) in sums.iter_mut().enumerate() {
                let at = i + v * 16;
                let v =
                    _mm512_maskz_loadu_ps(first_lanes(n.saturating_sub(at)), x.wrapping_add(at));
                *sum = _mm512_fmadd_ps(v, v, *sum);
            }
            i += 64;
        }
        let [a, b, c, d] = sums;
        _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)))
    }
}

/// A mask of the first `n` lanes, or of all.
pub fn first_lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn quantise_row(row: QuantiseRow) -> i32 {
    let scale = _mm512_set1_ps(row.scale);
    let mut sums = _mm512_setzero_si512();
    for block in 0..row.n.div_ceil(INT8_TILE_K) {
        let first = block * INT8_TILE_K;
        // SAFETY: the masks keep loads inside the row; `out` has room for the block, `sums` for its chunks.
        unsafe {
            let quants: [__m512i; INT8_TILE_K / 16] = std::array::from_fn(|v| {
                let at = first + v * 16;
                let mask = first_lanes(row.n.saturating_sub(at));
                let x = _mm512_maskz_loadu_ps(mask, row.x.wrapping_add(at));
                _mm512_cvtps_epi32(_mm512_mul_ps(x, scale))
            });
            let out = row.out.add(first * row.num_rows);
            for (v, &quants) in quants.iter().enumerate() {
                _mm_storeu_si128(out.add(v * 16).cast(), _mm512_cvtepi32_epi8(quants));
                sums = _mm512_add_epi32(sums, quants);
            }
            if row.sums.is_null() {
                continue;
            }
            let num_chunks = (row.n - first).div_ceil(CHUNK_K).min(INT8_TILE_K / CHUNK_K);
            for chunk in 0..num_chunks {
                let sum = _mm512_add_epi32(quants[2 * chunk], quants[2 * chunk + 1]);
                let at = (first / CHUNK_K + chunk) * row.num_rows;
                *row.sums.add(at) = _mm512_reduce_add_epi32(sum);
            }
        }
    }
    _mm512_reduce_add_epi32(sums)
}

/// The vectors of kernels that have one source for all instruction sets.
type Lanes = __m512;

elementwise!("avx512f,avx512bw,avx512dq,avx512vl,fma");

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn silu_mul(x: *const f32, num_rows: usize, out: *mut f32) {
    let one = _mm512_set1_ps(1.0);
    for row in 0..num_rows {
        // SAFETY: rows of `x` have 32 elements, rows of `out` have 16.
        unsafe {
            let gate = _mm512_loadu_ps(x.add(row * 32));
            let up = _mm512_loadu_ps(x.add(row * 32 + 16));
            let denominator =
                _mm512_add_ps(one, exp_lanes(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            let silu = _mm512_div_ps(gate, denominator);
            _mm512_storeu_ps(out.add(row * 16), _mm512_mul_ps(silu, up));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
fn exp_lanes(x: __m512) -> __m512 {
    // This operand order keeps a NaN in `x`.
    let x = _mm512_min_ps(
        _mm512_set1_ps(exp::MAX),
        _mm512_max_ps(_mm512_set1_ps(exp::MIN), x),
    );
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(
        _mm512_mul_ps(x, _mm512_set1_ps(exp::LOG2_E)),
    );
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN_2_HIGH), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN_2_LOW), r);
    let mut p = _mm512_set1_ps(exp::COEFFICIENTS[0]);
    for c in &exp::COEFFICIENTS[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
    let exponent = _mm512_slli_epi32::<23>(_mm512_add_epi32(
        _mm512_cvtps_epi32(n),
        _mm512_set1_epi32(127),
    ));
    _mm512_mul_ps(p, _mm512_castsi512_ps(exponent))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn peak(iterations: usize) -> f32 {
    let x = _mm512_set1_ps(std::hint::black_box(0.999));
    let y = _mm512_set1_ps(std::hint::black_box(0.001));
    let mut acc = [_mm512_set1_ps(1.0); 24];
    for _ in 0..iterations {
        for a in &mut acc {
            *a = _mm512_fmadd_ps(*a, x, y);
        }
    }
    let mut sum = _mm512_setzero_ps();
    for a in acc {
        sum = _mm512_add_ps(sum, a);
    }
    _mm512_reduce_add_ps(sum)
}

/// The number of independent sums in a peak measurement.
const NUM_SUMS: usize = 24;

unsafe fn int8_peak(iterations: usize) {
    // The number of AVX2 iterations with as many operations as one iteration here.
    const AVX2_ITERATIONS: usize = NUM_SUMS * 16 * 8 / avx2::INT8_PEAK.ops;
    // SAFETY: the caller promises this table's instruction set, and VNNI is used only if it was detected.
    unsafe {
        match is_x86_feature_detected!("avx512vnni") {
            true => vnni_peak(iterations),
            false => (avx2::INT8_PEAK.run)(AVX2_ITERATIONS * iterations),
        }
    }
}

#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn vnni_peak(iterations: usize) {
    let factors = std::hint::black_box([_mm512_set1_epi8(1); 2]);
    let mut sums = [_mm512_setzero_si512(); NUM_SUMS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, factors[0], factors[1]);
        }
    }
    std::hint::black_box(sums);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn read(bytes: *const u8, len: usize, fetch_ahead: bool) -> u32 {
    let mut acc = [_mm512_setzero_si512(); 4];
    for offset in (0..len).step_by(64) {
        // SAFETY: the offset is inside `len` bytes; prefetches may name any address.
        unsafe {
            let line = bytes.add(offset);
            if fetch_ahead {
                _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast());
            }
            let acc = &mut acc[offset / 64 % 4];
            *acc = _mm512_xor_si512(*acc, _mm512_loadu_si512(line.cast()));
        }
    }
    let [a, b, c, d] = acc;
    let mixed = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
    _mm512_reduce_or_epi32(mixed) as u32
}
