//! bf16 weights with instructions that multiply pairs of bf16 values, and rows rounded to bf16;
//! everything else as in AVX-512.
//!
//! An instruction adds the products of a pair of k to 16 lanes, each lane separately. Rows and weights have the layout
//! of matrix tiles. The kernels for matrix tiles use the other functions of this file.

pub mod attention;
mod in_place_attention;
mod tile_kv;
pub mod tile_softmax;

use std::arch::x86_64::*;

use self::attention::TILE_ATTENTION;
use self::tile_softmax::exp2_lanes;
use super::{FEW_ROWS, Kernels, Peak, Prefetch, TILE_K, TileRows, avx512, in_steps, with_rows};

pub const KERNELS: Kernels = Kernels {
    tile_gemm: Some(TILE_ROWS),
    norm_rotate: tile_kv::norm_rotate,
    tile_attention: Some(TILE_ATTENTION),
    ..avx512::KERNELS
};

pub const TILE_ROWS: TileRows = TileRows {
    max_rows: avx512::KERNELS.tile_rows,
    gemm,
    silu_mul,
    silu_mul_wide,
    weigh: tile_kv::weigh,
    pack: tile_kv::pack,
    fetch_to_write,
    peak: Peak {
        run: peak,
        ops: NUM_SUMS * 16 * 4,
    },
    unit: None,
};

pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vnni")
}

/// # Safety
/// See `TileGemm`.
// Arguments: those of the table of kernels.
unsafe fn gemm(
    rows: *const u8,
    num_rows: usize,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut f32,
    out_bytes: usize,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        with_rows!(num_rows, M in [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
            gemm_tile::<M>(rows, panel, num_blocks, prefetch, out, out_bytes));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn gemm_tile<const M: usize>(
    rows: *const u8,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut f32,
    out_bytes: usize,
) {
    // SAFETY: each block has 64 bytes of each row and two tiles of 1,024 bytes; `out` has M rows of 32.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); M]; 2];
        if M > FEW_ROWS {
            acc = add_blocks(acc, rows, panel, num_blocks, prefetch);
        } else if prefetch == Prefetch::Nothing {
            acc = add_lines(acc, rows, panel, num_blocks, Prefetch::Nothing);
        } else {
            acc = add_lines(acc, rows, panel, num_blocks, prefetch);
        }
        for r in 0..M {
            let out = out.byte_add(r * out_bytes);
            _mm512_storeu_ps(out, acc[0][r]);
            _mm512_storeu_ps(out.add(16), acc[1][r]);
        }
    }
}

/// The number of cache lines in a tile, each of which holds a pair of k.
const LINES: usize = TILE_K / 2;

/// Adds the products of M rows and blocks of weights, one line of both tiles of a block at a time.
///
/// # Safety
/// Each block has 64 bytes of each row, and 2,048 bytes of the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_blocks<const M: usize>(
    mut acc: [[__m512; M]; 2],
    rows: *const u8,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
) -> [[__m512; M]; 2] {
    let others = prefetch.only_ahead();
    for block in 0..num_blocks {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let x = rows.add(block * M * TILE_K * 2);
            let tiles = panel.add(block * 2048);
            for pair in 0..LINES {
                let (low, high) = (tiles.add(pair * 64), tiles.add(1024 + pair * 64));
                prefetch.issue(low, block * LINES + pair);
                others.issue(high, block * LINES + pair);
                let (low, high) = (load_pairs(low), load_pairs(high));
                for r in 0..M {
                    let x = spread_pair(x.add(r * TILE_K * 2 + pair * 4));
                    acc[0][r] = _mm512_dpbf16_ps(acc[0][r], x, low);
                    acc[1][r] = _mm512_dpbf16_ps(acc[1][r], x, high);
                }
            }
        }
    }
    acc
}

/// Like `add_blocks`, one line of one tile after the other.
///
/// # Safety
/// See `add_blocks`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_lines<const M: usize>(
    [mut low, mut high]: [[__m512; M]; 2],
    rows: *const u8,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
) -> [[__m512; M]; 2] {
    let lines = in_steps(LINES);
    for tile in 0..2 * num_blocks {
        let prefetch = prefetch.of_tile(tile);
        for line in lines.clone() {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let weights = panel.add((tile * LINES + line) * 64);
                prefetch.issue(weights, tile / 2 * LINES + line);
                let weights = load_pairs(weights);
                for r in 0..M {
                    let x = spread_pair(rows.add((tile / 2 * M + r) * TILE_K * 2 + line * 4));
                    low[r] = _mm512_dpbf16_ps(low[r], x, weights);
                }
            }
        }
        (low, high) = (high, low);
    }
    [low, high]
}

/// Loads one pair for each of 16 lanes.
///
/// # Safety
/// At `pairs` there are 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn load_pairs(pairs: *const u8) -> __m512bh {
    // SAFETY: the caller upholds the contract; both types are 64 bytes.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(pairs.cast())) }
}

/// Loads one pair into all 16 lanes.
///
/// # Safety
/// At `pair` there are 4 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn spread_pair(pair: *const u8) -> __m512bh {
    // SAFETY: the caller upholds the contract; both types are 64 bytes.
    unsafe {
        let pair = pair.cast::<i32>().read_unaligned();
        std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn silu_mul(x: *const f32, num_rows: usize, out: *mut u16) {
    for row in 0..num_rows {
        // SAFETY: rows of `x` have 32 elements, and rows of `out` are 32 elements apart.
        unsafe {
            let rounded = _mm512_cvtneps_pbh(silu_mul_lanes(x.add(row * 32)));
            _mm256_storeu_si256(
                out.add(row * TILE_K).cast(),
                std::mem::transmute::<__m256bh, __m256i>(rounded),
            );
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn silu_mul_wide(x: *const f32, num_rows: usize, out: *mut f32, stride: usize) {
    for row in 0..num_rows {
        // SAFETY: rows of `x` have 32 elements, and rows of `out` are `stride` elements apart.
        unsafe { _mm512_storeu_ps(out.add(row * stride), silu_mul_lanes(x.add(row * 32))) };
    }
}

/// Computes `silu(x) * up` for 16 gates. The reciprocal and the power of two have relative errors
/// of up to 1e-4, less than the rounding to bf16 or 8 bits that follows.
///
/// # Safety
/// At `x` there are 16 gates, and 16 values after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn silu_mul_lanes(x: *const f32) -> __m512 {
    // SAFETY: the caller upholds the contract.
    let (gate, up) = unsafe { (_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16))) };
    let power = _mm512_mul_ps(gate, _mm512_set1_ps(-std::f32::consts::LOG2_E));
    let denominator = _mm512_add_ps(_mm512_set1_ps(1.0), exp2_lanes(power));
    let silu = _mm512_mul_ps(gate, _mm512_rcp14_ps(denominator));
    _mm512_mul_ps(silu, up)
}

fn fetch_to_write(first: *const f32, num_rows: usize, stride: usize, num_lines: usize) {
    for row in 0..num_rows {
        for line in 0..num_lines {
            let line = first.wrapping_byte_add(row * stride + line * 64);
            // SAFETY: prefetches may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) };
        }
    }
}

/// The number of independent sums in a peak measurement.
const NUM_SUMS: usize = 24;

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn peak(iterations: usize) {
    // SAFETY: both types have the same size, and zeros are valid in both.
    let zeros = unsafe { std::mem::transmute::<__m512, __m512bh>(_mm512_setzero_ps()) };
    let factors = std::hint::black_box([zeros; 2]);
    let mut sums = [_mm512_setzero_ps(); NUM_SUMS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, factors[0], factors[1]);
        }
    }
    std::hint::black_box(sums);
}
