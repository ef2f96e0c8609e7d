//! Kernels in plain Rust, for any machine: multiplication and addition are rounded separately, and tiles have 4 rows.

mod attention;
mod grouped;

use corella_model::Activation;
use half::{bf16, f16};

use self::attention::{scores, softmax_block, values};
use super::{
    BF16, ByFormat, ByKvFormat, F16, F32, INT8, INT8_TILE_K, Int8Rows, Kernels, PANEL_LANES,
    Prefetch, QuantiseRow, element_size,
    elementwise::{self, elementwise},
    exp::exp_lane,
    sum_lanes, with_rows,
};

pub static KERNELS: Kernels = Kernels {
    tile_rows: 4,
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
    int8_peak: None,
    read,
};

unsafe fn gemm<const FORMAT: u8>(
    a: *const f32,
    num_rows: usize,
    panel: *const u8,
    k: usize,
    _fetch_ahead: bool,
    out: *mut f32,
) {
    for q in 0..PANEL_LANES / 8 {
        // SAFETY: the caller upholds the contract.
        unsafe {
            with_rows!(num_rows, M in [1 2 3 4], gemm_tile::<FORMAT, M>(a, panel, q, k, out));
        }
    }
}

/// Computes words 8q..8q+8 of a panel row, whose sums fit into the registers of any processor.
unsafe fn gemm_tile<const FORMAT: u8, const M: usize>(
    a: *const f32,
    panel: *const u8,
    q: usize,
    k: usize,
    out: *mut f32,
) {
    let row_bytes = PANEL_LANES * element_size(FORMAT);
    // SAFETY: `a` has k * M elements, the panel k rows, `out` M rows of 32.
    unsafe {
        let mut acc = [[0.0f32; 8]; M];
        for i in 0..k {
            let b =
                load_lanes::<FORMAT, 8>(panel.add(i * row_bytes + q * 8 * element_size(FORMAT)));
            for r in 0..M {
                let x = *a.add(i * M + r);
                for l in 0..8 {
                    acc[r][l] += x * b[l];
                }
            }
        }
        for r in 0..M {
            for l in 0..8 {
                let position = q * 8 + l;
                let lane = match FORMAT {
                    BF16 => position / 2 + position % 2 * 16,
                    _ => position,
                };
                *out.add(r * PANEL_LANES + lane) = acc[r][l];
            }
        }
    }
}

/// Loads `N` consecutive elements as f32.
#[inline]
unsafe fn load_lanes<const FORMAT: u8, const N: usize>(elements: *const u8) -> [f32; N] {
    let mut lanes = [0.0; N];
    // SAFETY: the caller promises N elements, which may be unaligned.
    unsafe {
        match FORMAT {
            F32 => {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    *lane = elements.cast::<f32>().add(l).read_unaligned();
                }
            }
            BF16 => {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    let bits = elements.cast::<u16>().add(l).read_unaligned();
                    *lane = bf16::from_bits(bits).to_f32();
                }
            }
            INT8 => {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    *lane = f32::from(*elements.cast::<i8>().add(l));
                }
            }
            _ => {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    let bits = elements.cast::<u16>().add(l).read_unaligned();
                    *lane = f16::from_bits(bits).to_f32();
                }
            }
        }
    }
    lanes
}

unsafe fn int8_gemm(
    Int8Rows { rows, num_rows, .. }: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    _requests: Prefetch,
    out: *mut i32,
    out_bytes: usize,
) {
    for row in 0..num_rows {
        let mut sums = [0_i32; PANEL_LANES];
        for block in 0..num_blocks {
            // SAFETY: each block has 64 bytes of each row, and two tiles of the panel.
            let (x, tiles) = unsafe {
                let x = rows.add((block * num_rows + row) * INT8_TILE_K);
                let tiles = panel.add(block * INT8_TILE_K * PANEL_LANES);
                (
                    *x.cast::<[i8; INT8_TILE_K]>(),
                    *tiles.cast::<[[[[i8; 4]; 16]; 16]; 2]>(),
                )
            };
            for (half, tile) in tiles.iter().enumerate() {
                for (x, weights) in x.chunks_exact(4).zip(tile) {
                    for (lane, w) in weights.iter().enumerate() {
                        let products = x.iter().zip(w).map(|(&x, &w)| i32::from(x) * i32::from(w));
                        sums[half * 16 + lane] += products.sum::<i32>();
                    }
                }
            }
        }
        // SAFETY: `out` has `num_rows` rows of 32.
        unsafe {
            out.byte_add(row * out_bytes)
                .cast::<[i32; PANEL_LANES]>()
                .write_unaligned(sums)
        };
    }
}

#[inline]
unsafe fn sum_of_squares(x: *const f32, n: usize) -> f32 {
    // SAFETY: `x` has n elements.
    let x = unsafe { std::slice::from_raw_parts(x, n) };
    let mut lanes = [0.0; 16];
    for chunk in x.chunks(16) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    sum_lanes(&lanes)
}

unsafe fn quantise_row(row: QuantiseRow) -> i32 {
    // SAFETY: the caller upholds the contract.
    unsafe { elementwise::quantise_row(row) }
}

/// The vectors of kernels that have one source for all instruction sets.
type Lanes = super::vector::Four;

elementwise!();

unsafe fn silu_mul(x: *const f32, num_rows: usize, out: *mut f32) {
    // SAFETY: rows of `x` have 32 elements, rows of `out` have 16.
    let (x, out) = unsafe {
        (
            std::slice::from_raw_parts(x, num_rows * 32),
            std::slice::from_raw_parts_mut(out, num_rows * 16),
        )
    };
    for (x, out) in x.chunks(32).zip(out.chunks_mut(16)) {
        let (gate, up) = x.split_at(16);
        for l in 0..16 {
            out[l] = gate[l] / (1.0 + exp_lane(-gate[l])) * up[l];
        }
    }
}

unsafe fn peak(iterations: usize) -> f32 {
    let x = std::hint::black_box(0.999);
    let y = std::hint::black_box(0.001);
    let mut acc = [[1.0f32; 8]; 12];
    for _ in 0..iterations {
        for a in acc.as_flattened_mut() {
            *a = *a * x + y;
        }
    }
    acc.as_flattened().iter().sum()
}

unsafe fn read(bytes: *const u8, len: usize, _fetch_ahead: bool) -> u32 {
    // SAFETY: there are `len` bytes, a multiple of 8, and `bytes` is aligned to 8 at least.
    let words = unsafe { std::slice::from_raw_parts(bytes.cast::<u64>(), len / 8) };
    let mut acc = [0u64; 8];
    for chunk in words.chunks_exact(8) {
        for (a, word) in acc.iter_mut().zip(chunk) {
            *a ^= word;
        }
    }
    acc.iter().fold(0, |a, b| a ^ b) as u32
}
