//! The table of functions that each instruction set fills in.

use corella_model::{Activation, DType, KvFormat};

use super::elementwise::{NormRotate, QuantiseRow};
use super::form::{Form, TILE_K};
use super::gated_delta::{Convolution, DeltaRows, StateUpdate};
use super::gemm::{Gemm, Int8Gemm, TileRows};
use super::grouped::GroupedGemm;
use super::low_rank::{LowRankDown, LowRankUp};
use super::peak::Peak;
use super::row_attention::{Scores, Values};
use super::tile_attention::{KEY_TILE, TileAttention};

/// The kernels of one instruction set. Every function requires that instruction set, and pointers
/// that are valid for the extents it names.
pub struct Kernels {
    /// The number of rows of a full tile.
    pub tile_rows: usize,
    pub gemm: ByFormat<Gemm>,
    /// For processors that multiply bf16: GEMM of bf16 weights packed in tiles, and rows rounded to bf16.
    pub tile_gemm: Option<TileRows>,
    /// Takes up to `tile_rows` rows; if there is a `tile_gemm`, up to its `max_rows`.
    pub int8_gemm: Int8Gemm,
    /// Takes as many rows as `int8_gemm`; `out` has room for that many.
    pub grouped_gemm: GroupedGemm,
    /// Quantises a row, and returns the sum of its integers.
    pub quantise_row: unsafe fn(QuantiseRow) -> i32,
    /// Quantises groups of `group_len` elements, a multiple of 16, to integers from 0 to 15 and a
    /// scale: `x[i]` is about `scale * (q[i] - 8)`.
    pub quantise_groups:
        unsafe fn(x: *const f32, num_groups: usize, group_len: usize, q: *mut u8, scales: *mut f32),
    /// The bits of the largest magnitude. An infinity is larger than all numbers, and a NaN is larger than an infinity.
    pub largest_bits: unsafe fn(x: *const f32, n: usize) -> u32,
    /// `out[i] = round(x[i] * scale)`, ties to even. The result is unspecified if it does not fit in 8 bits.
    pub quantise: unsafe fn(x: *const f32, n: usize, scale: f32, out: *mut i8),
    /// Multiplies `x` by a Hadamard matrix of order `HADAMARD_ORDER`, of which `n` is a multiple,
    /// in place. Applying it twice gives `x` again.
    pub hadamard: unsafe fn(x: *mut f32, n: usize),
    /// `out[row][lane] = sums[row][lane] * row_scales[row] * lane_scales[lane]` for the lanes of a
    /// panel. Rows of `out`, which may be `sums`, are `stride` elements apart.
    pub scale_sums: unsafe fn(
        sums: *const i32,
        num_rows: usize,
        row_scales: *const f32,
        lane_scales: *const f32,
        out: *mut f32,
        stride: usize,
    ),
    /// `scale_sums` for f32 sums.
    pub scale_rows: unsafe fn(
        x: *const f32,
        num_rows: usize,
        row_scales: *const f32,
        lane_scales: *const f32,
        out: *mut f32,
        stride: usize,
    ),
    /// Σ x², for RMS norms.
    pub sum_of_squares: unsafe fn(x: *const f32, n: usize) -> f32,
    /// `out[i] = x[i] * scale * weight[i]`; `out` may be `x`.
    pub weigh: unsafe fn(x: *const f32, weight: *const f32, scale: f32, n: usize, out: *mut f32),
    /// The mean and the variance of a row, for layer norms.
    pub moments: unsafe fn(x: *const f32, n: usize) -> [f32; 2],
    /// `out[i] = (x[i] - mean) * scale * weight[i] + bias[i]`.
    pub weigh_centred: unsafe fn(
        x: *const f32,
        weight: *const f32,
        bias: *const f32,
        mean_and_scale: [f32; 2],
        n: usize,
        out: *mut f32,
    ),
    /// Applies norm and RoPE to one head; `out` may be the input.
    pub norm_rotate: unsafe fn(NormRotate, out: *mut f32),
    /// Rounds to bf16, ties to even.
    pub round: unsafe fn(x: *const f32, n: usize, out: *mut u16),
    /// `values[row][lane] += bias[lane]` for the lanes of a panel.
    pub add_bias: unsafe fn(bias: *const f32, num_rows: usize, values: *mut f32),
    /// `out[row][lane] += x[row][lane]` for the lanes of a panel. Rows of `out` are `stride` elements apart.
    pub add_lanes: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// `out[row][i] = silu(x[row][i]) * x[row][16 + i]` for `i < 16`. Rows of `x` have 32 elements, rows of `out` 16.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32),
    /// Applies an activation function in place.
    pub activate: unsafe fn(activation: Activation, x: *mut f32, n: usize),
    /// `x[i] = cap * tanh(x[i] * scale / cap)`.
    pub soft_cap: unsafe fn(x: *mut f32, n: usize, scale: f32, cap: f32),
    /// Computes rows of a gated delta network.
    pub delta_rows: unsafe fn(DeltaRows<'_>),
    /// Moves the state of a gated delta network on after a chunk.
    pub update_state: unsafe fn(StateUpdate<'_>),
    /// Convolves channels over tokens.
    pub convolve: unsafe fn(Convolution<'_>),
    /// `x[i] *= sigmoid(gates[i])`.
    pub gate: unsafe fn(x: *mut f32, gates: *const f32, n: usize),
    /// Multiplies a row by the first matrix of an adapter.
    pub low_rank_down: unsafe fn(LowRankDown),
    /// Adds the product with the second matrix of an adapter to outputs.
    pub low_rank_up: unsafe fn(LowRankUp),
    pub scores: ByKvFormat<Scores>,
    /// Turns one row's `ATTENTION_BLOCK` scores into weights `exp(score - max)`; all but the first
    /// `limit` weights are 0. Updates the running maximum and the 16 running sums, and returns the
    /// factor for values accumulated before.
    pub softmax_block:
        unsafe fn(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32,
    pub values: ByKvFormat<Values>,
    /// For processors that multiply bf16: attention over KV that bf16 represents exactly, with
    /// queries and weights rounded to bf16.
    pub tile_attention: Option<TileAttention>,
    /// Runs independent chains of multiply-adds in registers, `peak_flops` operations per iteration.
    pub peak: unsafe fn(iterations: usize) -> f32,
    pub peak_flops: usize,
    /// Products of 8-bit integers in registers, if there are instructions for them.
    pub int8_peak: Option<Peak>,
    /// Reads `len` bytes, a multiple of 4096, as fast as possible; `fetch_ahead` is as in [`Gemm`].
    pub read: unsafe fn(bytes: *const u8, len: usize, fetch_ahead: bool) -> u32,
}

impl Kernels {
    /// Whether attention goes through matrix tiles: bf16 represents the keys and values exactly,
    /// heads fill tiles, and the positions of a tile lie in one page.
    pub fn attends_through_tiles(&self, head_dim: usize, kv: KvFormat, page_size: usize) -> bool {
        let is_exact = matches!(kv, KvFormat::Float(DType::Bf16) | KvFormat::Int8);
        let fits = head_dim.is_multiple_of(TILE_K) && page_size.is_multiple_of(KEY_TILE);
        self.tile_attention.is_some() && is_exact && fits
    }

    /// The largest number of rows that a GEMM of the given form takes.
    pub fn rows_at_once(&self, form: Form) -> usize {
        match (form, &self.tile_gemm) {
            (Form::MatrixTiles | Form::Int8, Some(tiles)) => tiles.max_rows,
            _ => self.tile_rows,
        }
    }
}

/// One function per floating-point format.
pub struct ByFormat<T> {
    pub f32: T,
    pub bf16: T,
    pub f16: T,
}

impl<T: Copy> ByFormat<T> {
    pub fn of(&self, dtype: DType) -> T {
        match dtype {
            DType::F32 => self.f32,
            DType::Bf16 => self.bf16,
            DType::F16 => self.f16,
        }
    }
}

/// One function per format of keys and values.
pub struct ByKvFormat<T> {
    pub f32: T,
    pub bf16: T,
    pub f16: T,
    pub int8: T,
}

impl<T: Copy> ByKvFormat<T> {
    pub fn of(&self, format: KvFormat) -> T {
        match format {
            KvFormat::Float(DType::F32) => self.f32,
            KvFormat::Float(DType::Bf16) => self.bf16,
            KvFormat::Float(DType::F16) => self.f16,
            KvFormat::Int8 => self.int8,
        }
    }
}
