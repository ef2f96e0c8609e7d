//! The kernels of all instruction sets, and the table that each set fills in.
//!
//! The files of this folder hold the same functions in the same order. Within one table, a value is
//! always computed by the same sequence of roundings, whatever the number of rows, panels or
//! threads. Different tables may differ in the last bits.
#![expect(
    clippy::needless_range_loop,
    reason = "an index names the same row or lane in several arrays"
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod elementwise;
mod form;
pub mod grouped;
mod hadamard;
mod isa;
mod line_queue;
mod portable;
mod prefetch;
mod processor;
mod products;

pub use self::form::Form;
pub use self::hadamard::HADAMARD_ORDER;
#[cfg(test)]
pub use self::isa::kernels;
pub use self::isa::{Isa, choose_kernels, detect_isa, is_supported};
pub use self::line_queue::{LineQueue, fetch_line};
pub use self::prefetch::Prefetch;
#[cfg(target_arch = "x86_64")]
use self::prefetch::{in_steps, line_ahead};
pub use self::processor::wants_prefetch;
pub use self::products::{PRODUCT_LANES, add_products};

use std::ops::Range;

use corella_model::{DType, KvFormat};

use grouped::GroupedGemm;

/// The number of output channels (lanes) of a weight panel.
pub const PANEL_LANES: usize = 32;
/// The largest number of rows in a tile of any table, matrix tiles aside.
pub const MAX_TILE_ROWS: usize = 14;
/// The largest number of rows in a pair of matrix tiles.
pub const MAX_MATRIX_ROWS: usize = 32;
/// The number of cache lines that a block of more than 16 rows prefetches of the next panel.
pub const NEXT_LINES: usize = 4;
/// Up to this many rows, a GEMM is bound by memory. Kernels then read line after line, as hardware
/// prefetchers expect, and not two lines for each k.
pub const FEW_ROWS: usize = 8;
/// The number of k that one matrix tile of bf16 holds.
pub const TILE_K: usize = 32;
/// The number of k that one matrix tile of 8-bit integers holds.
pub const INT8_TILE_K: usize = 64;
/// The number of positions that one softmax takes, counted from position 0 of the sequence.
pub const ATTENTION_BLOCK: usize = 64;
/// The number of positions, or head dimensions, that attention computes side by side. Reads of KV
/// rows run up to this many elements past their end.
pub const ATTENTION_LANES: usize = 16;

/// The kernels of one instruction set. Every function requires that instruction set, and pointers
/// that are valid for the extents it names.
pub struct Kernels {
    /// The number of rows of a full tile.
    pub tile_rows: usize,
    pub gemm: ByFormat<Gemm>,
    /// For processors that multiply bf16: GEMM of bf16 weights packed in tiles, and rows rounded to
    /// bf16.
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
    /// The bits of the largest magnitude. They are those of no finite number if there is a NaN or
    /// infinity.
    pub largest_bits: unsafe fn(x: *const f32, n: usize) -> u32,
    /// `out[i] = round(x[i] * scale)`, ties to even. The result is unspecified if it does not fit
    /// in 8 bits.
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
    /// Applies norm and RoPE to one head; `out` may be the input.
    pub norm_rotate: unsafe fn(NormRotate, out: *mut f32),
    /// Rounds to bf16, ties to even.
    pub round: unsafe fn(x: *const f32, n: usize, out: *mut u16),
    /// `out[row][lane] += x[row][lane]` for the lanes of a panel. Rows of `out` are `stride`
    /// elements apart.
    pub add_lanes: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// `out[row][i] = silu(x[row][i]) * x[row][16 + i]` for `i < 16`. Rows of `x` have 32 elements,
    /// rows of `out` 16.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32),
    pub scores: ByKvFormat<Scores>,
    /// Turns one row's `ATTENTION_BLOCK` scores into weights `exp(score - max)`; all but the first
    /// `limit` weights are 0. Updates the running maximum and the 16 running sums, and returns the
    /// factor by which everything accumulated before must be multiplied.
    pub softmax_block:
        unsafe fn(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32,
    pub values: ByKvFormat<Values>,
    /// For processors that multiply bf16: attention over KV that bf16 represents exactly, with
    /// queries and weights rounded to bf16.
    pub tile_attention: Option<TileAttention>,
    /// Runs independent chains of multiply-adds in registers, `peak_flops` operations per
    /// iteration.
    pub peak: unsafe fn(iterations: usize) -> f32,
    pub peak_flops: usize,
    /// Products of 8-bit integers in registers, if there are instructions for them.
    pub int8_peak: Option<Peak>,
    /// Reads `len` bytes, a multiple of 4096, as fast as possible; `fetch_ahead` is that of
    /// [`Gemm`].
    pub read: unsafe fn(bytes: *const u8, len: usize, fetch_ahead: bool) -> u32,
}

impl Kernels {
    /// The attention kernels with matrix tiles, if they can be used for this head size and KV
    /// format.
    pub fn attention_through_tiles(&self, head_dim: usize, kv: KvFormat) -> Option<&TileAttention> {
        let is_exact = matches!(kv, KvFormat::Float(DType::Bf16) | KvFormat::Int8);
        let fits = is_exact && head_dim.is_multiple_of(TILE_K);
        self.tile_attention.as_ref().filter(|_| fits)
    }

    /// The largest number of rows that a GEMM of the given form takes.
    pub fn rows_at_once(&self, form: Form) -> usize {
        match (form, &self.tile_gemm) {
            (Form::MatrixTiles | Form::Int8, Some(tiles)) => tiles.max_rows,
            _ => self.tile_rows,
        }
    }
}

/// `out[row][lane] = Σ_k a[k][row] * panel[k][lane]`, accumulated in ascending order of k. `a` is
/// `[k][num_rows]`. With `fetch_ahead` the panel comes from memory, and the kernel prefetches what
/// lies behind it.
pub type Gemm = unsafe fn(
    a: *const f32,
    num_rows: usize,
    panel: *const u8,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
);

/// A loop of independent instructions, to measure peak throughput.
#[derive(Clone, Copy)]
pub struct Peak {
    pub run: unsafe fn(iterations: usize),
    /// The number of operations per iteration.
    pub ops: usize,
}

/// The GEMM of bf16 rows and bf16 weights, and what belongs to it.
#[derive(Clone, Copy)]
pub struct TileRows {
    /// The largest number of rows that the GEMM takes.
    pub max_rows: usize,
    pub gemm: TileGemm,
    /// `Kernels::silu_mul` with outputs in bf16, whose rows are `TILE_K` elements apart.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut u16),
    /// `Kernels::silu_mul` with outputs in f32, whose rows are `stride` elements apart.
    pub silu_mul_wide: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// `Kernels::weigh` with outputs in bf16, in blocks of `TILE_K` elements that are `stride`
    /// elements apart.
    pub weigh: unsafe fn(
        x: *const f32,
        weight: *const f32,
        scale: f32,
        n: usize,
        out: *mut u16,
        stride: usize,
    ),
    /// Packs `num_blocks * TILE_K` weights of 16 lanes into their half of a panel, in the layout of
    /// `gemm`. `to` is aligned to a cache line.
    pub pack: unsafe fn(lanes: [*const u8; 16], num_blocks: usize, to: *mut u8),
    /// Prefetches, for writing, the first `num_lines` cache lines of some rows, which are `stride`
    /// bytes apart. May name any address.
    pub fetch_to_write: fn(first: *const f32, num_rows: usize, stride: usize, num_lines: usize),
    pub peak: Peak,
    /// The tile unit, if the processor has one.
    pub unit: Option<TileUnit>,
}

/// The processor's matrix-tile unit.
#[derive(Clone, Copy)]
pub struct TileUnit {
    /// To be called before the first GEMM in a thread, and whenever the number of rows changes.
    pub configure: unsafe fn(num_rows: usize),
    /// Computes a part of a bf16 GEMM.
    pub gemm_part: unsafe fn(&TilePart),
    /// Computes a part of an 8-bit GEMM, with the layout of `Kernels::int8_gemm`.
    pub int8_gemm_part: unsafe fn(&TilePart),
    /// To be called after the last GEMM in a thread: threads without tile data are cheaper to
    /// switch.
    pub release: unsafe fn(),
}

/// A [`TileGemm`] or [`Int8Gemm`] over some blocks of k, for many rows. Sums are f32 or i32.
pub struct TilePart {
    pub rows: *const u8,
    pub num_rows: usize,
    pub panel: *const u8,
    pub num_blocks: usize,
    /// The sums of the blocks before, `num_rows` rows of 32; null if there are none. May be `out`.
    pub sums: *const u32,
    /// Where to prefetch `NEXT_LINES` lines per block; null to prefetch nothing.
    pub next: *const u8,
    pub out: *mut u32,
    pub out_bytes: usize,
}

/// `out[row][lane] = Σ_k rows[row][k] * panel[k][lane]` for up to `max_rows` rows of bf16.
///
/// `rows` is `[k / 32][row][32]`. `panel` has two tiles per block of 32 k, for lanes 0–15 and
/// 16–31, each `[pair of k][lane][2]`. Rows of `out` are `out_bytes` apart. The thread's tiles must
/// be configured for `num_rows` rows.
pub type TileGemm = unsafe fn(
    rows: *const u8,
    num_rows: usize,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut f32,
    out_bytes: usize,
);

/// A tile of rows of 8-bit integers, `[k / 64][row][64]`.
#[derive(Clone, Copy)]
pub struct Int8Rows {
    pub rows: *const u8,
    pub num_rows: usize,
    /// The sum of each row's integers.
    pub sums: *const i32,
}

/// [`TileGemm`] for 8-bit integers of magnitude 127 at most, with exact sums. `rows` is
/// `[k / 64][row][64]`. `panel` has two tiles per block of 64 k, each `[quad of k][lane][4]`.
pub type Int8Gemm = unsafe fn(
    rows: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut i32,
    out_bytes: usize,
);

/// The keys of consecutive positions in one page, whose scores are computed side by side.
#[derive(Clone, Copy)]
pub struct KeyGroup {
    /// Points to dimension 0 of the first position.
    pub keys: *const u8,
    /// The number of positions, `ATTENTION_LANES` at most.
    pub num_positions: usize,
    /// The place of their scores in a row of `ATTENTION_BLOCK`.
    pub offset: usize,
}

/// `out[row][offset + lane] = Σ_i q[i][row] * keys[i][lane]`, accumulated in ascending order of i.
/// The dimensions of a key are `stride` bytes apart.
pub type Scores = unsafe fn(
    q: *const f32,
    num_rows: usize,
    groups: &[KeyGroup],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
);

/// The values of consecutive positions in one page, `[position][head_dim]`.
#[derive(Clone, Copy)]
pub struct ValueRun {
    pub values: *const u8,
    pub num_positions: usize,
}

/// `out[row] = out[row] * scale[row] + Σ_j weights[row][j] * values[j]`, accumulated in ascending
/// order of j over the runs. Rows of `weights` have `ATTENTION_BLOCK` elements. Rows of `out` have
/// `out_stride`, which is `head_dim` rounded up to `ATTENTION_LANES`.
pub type Values = unsafe fn(
    weights: *const f32,
    num_rows: usize,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    out: *mut f32,
    out_stride: usize,
);

/// The number of positions in a block of attention with matrix tiles, counted from position 0 of
/// the sequence.
pub const TILE_ATTENTION_BLOCK: usize = 256;
/// The number of positions that one softmax takes in attention with matrix tiles.
pub const TILE_SOFTMAX_BLOCK: usize = 64;
/// The largest number of rows for which copying keys and values does not pay.
pub const IN_PLACE_ROWS: usize = 8;
/// The number of positions in a tile of keys.
pub const KEY_TILE: usize = 16;
/// The number of positions in a tile of values, or of weights.
pub const VALUE_TILE: usize = 32;
/// The number of query rows that share tiles.
pub const QUERY_TILE_ROWS: usize = 32;
/// The distance between tiles of weights, in elements. A tile is `[row][32]`.
pub const ROW_TILE_LEN: usize = QUERY_TILE_ROWS * 32;

/// Quantises a row into its tile, in blocks of `INT8_TILE_K` elements, the last padded with zeros,
/// and sums its chunks of integers.
pub struct QuantiseRow {
    pub x: *const f32,
    pub n: usize,
    pub scale: f32,
    /// Where the row's first block goes.
    pub out: *mut i8,
    /// Where the sum of its first chunk goes, or null. The sums of a tile's rows are adjacent.
    pub sums: *mut i32,
    /// The number of rows of the tile.
    pub num_rows: usize,
}

/// One head, to which RMS norm (unless `weight` is null) and RoPE are applied. RoPE rotates element
/// i together with element `i + head_dim / 2`.
#[derive(Clone, Copy)]
pub struct NormRotate {
    pub x: *const f32,
    /// `head_dim` norm weights, or null.
    pub weight: *const f32,
    pub eps: f32,
    /// The cosines for half a head, then the sines.
    pub angles: *const f32,
    pub head_dim: usize,
}

/// Attention of up to `QUERY_TILE_ROWS` rows with matrix tiles.
#[derive(Clone, Copy)]
pub struct TileAttention {
    /// To be called before all other functions in a thread, and whenever the number of rows
    /// changes.
    pub configure: unsafe fn(num_rows: usize),
    /// `Kernels::norm_rotate` with the output rounded to bf16.
    pub norm_rotate_rounded: unsafe fn(NormRotate, out: *mut u16),
    pub store_keys: StoreRows,
    pub store_values: StoreRows,
    pub scores: TileScores,
    /// Computes the softmax and, at the same time, products for which the thread's tiles are
    /// configured.
    pub softmax: unsafe fn(TileSoftmax<'_>, &[TileProduct]),
    /// Copies up to `KEY_TILE` positions, whose pairs are `head_dim * 4` bytes apart, into half a
    /// tile of values for `TileValues`, padded with zeros. Prefetches some lines meanwhile.
    pub copy_values: CopyValues,
    /// `copy_values` from 8-bit integers.
    pub widen_values: CopyValues,
    /// Converts a tile of 8-bit keys, whose pairs of dimensions are `stride` bytes apart, to bf16.
    /// Prefetches some lines meanwhile.
    pub widen_keys: unsafe fn(
        from: *const u8,
        stride: usize,
        head_dim: usize,
        to: *mut u16,
        lines: &mut LineQueue,
    ),
    pub values: TileValues,
    /// Kernels for a few rows that read bf16 keys and values in their pages.
    pub in_place: Option<InPlaceAttention>,
    /// Kernels for a few rows that read 8-bit keys and values in their pages.
    pub int8_in_place: Option<InPlaceAttention>,
    /// Reads one row of `out`, divided by its sum of weights. -0 becomes 0, so that the sign does
    /// not depend on masked positions.
    pub store_row: unsafe fn(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut f32),
    /// `store_row` with the output in bf16, in blocks of `TILE_K` elements that are `stride`
    /// elements apart.
    pub store_rounded:
        unsafe fn(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut u16, stride: usize),
    /// To be called last in a thread: threads without tile data are cheaper to switch.
    pub release: unsafe fn(),
}

/// `out[row][16 g + p] = Σ_i q[row][i] * keys[g][i][p]` for the 16 positions p of each tile g.
/// There is an even number of tiles, with at most `TILE_SOFTMAX_BLOCK` positions.
///
/// Queries are bf16, `q_stride` bytes apart. A tile of keys is `[pair of dimensions][position][2]`,
/// its pairs `stride` bytes apart. Rows of `out` have `TILE_SOFTMAX_BLOCK` elements. With up to 16
/// rows, some lines are prefetched meanwhile.
pub type TileScores = unsafe fn(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
);

/// Tiles of `KEY_TILE` keys each, whose pairs of dimensions are `stride` bytes apart.
#[derive(Clone, Copy)]
pub struct KeyTiles<'a> {
    pub tiles: &'a [*const u8],
    pub stride: usize,
    pub head_dim: usize,
}

/// The product of bf16 rows and 32 columns, in blocks of `TILE_K` inner elements: scores as in
/// `TileScores`, or values as in `TileValues`. There are more than 16 rows, as many as the tiles
/// are configured for.
#[derive(Clone, Copy)]
pub struct TileProduct {
    /// The rows of the first block; the next block is `a_step` bytes further on.
    pub a: *const u8,
    /// The distance between rows of `a`, in bytes.
    pub a_stride: usize,
    pub a_step: usize,
    /// Columns 0–15 and 16–31 of the first block.
    pub b: [*const u8; 2],
    /// The distance between pairs of inner elements of `b`, in bytes.
    pub b_stride: usize,
    pub b_step: usize,
    pub num_blocks: usize,
    pub out: *mut f32,
    /// The distance between rows of `out`, in bytes.
    pub out_stride: usize,
    /// The distance from column 0 to column 16 of `out`, in bytes.
    pub right: usize,
    /// The distance from row 0 to row 16 of `out`, in bytes.
    pub below: usize,
    /// Whether the product is added to `out`.
    pub adds: bool,
}

/// Rounds rows, which are `stride` elements apart, into positions of a tile. Tiles of keys hold
/// pairs of dimensions, `tile_stride` bytes apart; tiles of values hold pairs of positions.
pub type StoreRows = unsafe fn(
    rows: *const f32,
    stride: usize,
    positions: Range<usize>,
    head_dim: usize,
    tile: *mut u8,
    tile_stride: usize,
);

/// See [`TileAttention::copy_values`].
pub type CopyValues = unsafe fn(
    from: *const u8,
    num_positions: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
);

/// The running sum and reference of a query row's softmax.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct RowSums {
    /// Partial sums of the row's weights, one per lane.
    pub sums: [f32; 16],
    /// The exponent to which weights are relative: a weight is 2 to the power of its score, in
    /// powers of 2, minus this. It is an integer, raised when a score exceeds it by more than 16,
    /// so that rescaling is exact.
    pub reference: f32,
}

impl RowSums {
    pub const NONE: Self = Self {
        sums: [0.0; 16],
        reference: f32::NEG_INFINITY,
    };
}

/// One softmax block: scores of `TILE_SOFTMAX_BLOCK` positions, which become weights in bf16. If a
/// row's reference rises, what it accumulated before is rescaled.
pub struct TileSoftmax<'a> {
    pub scores: *const f32,
    /// The factor that scores are still to be multiplied by.
    pub scale: f32,
    /// The scales of the positions' keys and values, if these are integers.
    pub scales: Option<[*const f32; 2]>,
    /// The first position, counted from the start of the sequence.
    pub start: usize,
    /// For each row, the number of positions of the sequence that it attends to, ascending.
    /// Positions beyond have weight 0.
    pub ends: &'a [usize],
    pub rows: &'a mut [RowSums],
    /// The tiles of weights of the `TILE_ATTENTION_BLOCK`.
    pub weights: *mut u16,
    pub head_dim: usize,
    /// The rows' outputs, in the layout of `TileValues`.
    pub out: *mut f32,
}

/// `out[row] += Σ_j weights[row][j] * values[j]`, over some tiles of values.
///
/// A tile of values is `[head_dim / 16][pair of positions][16 dimensions][2]`. `out` is
/// `[head_dim / 16][row][16]`. Only the dimensions in `dims` are computed, which begin and end at
/// multiples of 32. With up to 16 rows, some lines are prefetched meanwhile.
pub type TileValues = unsafe fn(
    weights: *const u16,
    num_rows: usize,
    values: ValueTiles,
    dims: Range<usize>,
    out: *mut f32,
    lines: &mut LineQueue,
);

/// Tiles of `VALUE_TILE` values each, one after the other.
#[derive(Clone, Copy)]
pub struct ValueTiles {
    pub first: *const u16,
    pub num_tiles: usize,
    pub head_dim: usize,
}

/// Attention kernels that read keys and values in their pages, for up to `IN_PLACE_ROWS` rows.
#[derive(Clone, Copy)]
pub struct InPlaceAttention {
    pub scores: TileScores,
    pub values: TileValuesInPlace,
}

/// [`TileValues`] for all dimensions, with values as [`TileAttention::store_values`] stores them,
/// or 8-bit integers in the same layout.
pub type TileValuesInPlace = unsafe fn(
    weights: *const u16,
    num_rows: usize,
    values: PageValues<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
);

/// Tiles of `KEY_TILE` values each; the last one may have fewer.
#[derive(Clone, Copy)]
pub struct PageValues<'a> {
    pub tiles: &'a [*const u8],
    /// The number of positions in all tiles.
    pub num_positions: usize,
    pub head_dim: usize,
}

/// The index of dimension i of a row in `TileValues`' `out`.
pub fn tile_out_index(row: usize, i: usize) -> usize {
    (i / 16 * 2 + row / 16) * 256 + row % 16 * 16 + i % 16
}

/// The index of dimension i of a position in a tile of values.
pub fn tile_value_index(position: usize, i: usize) -> usize {
    i / 16 * 512 + position / 2 * 32 + i % 16 * 2 + position % 2
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

/// Formats as constants, because const generics take no enums.
const F32: u8 = 0;
const BF16: u8 = 1;
const F16: u8 = 2;
/// Used for keys and values only.
const INT8: u8 = 3;

const fn element_size(format: u8) -> usize {
    match format {
        F32 => 4,
        INT8 => 1,
        _ => 2,
    }
}

/// The index of a lane's element in a panel row. In bf16, two lanes that are 16 apart share a
/// 32-bit word, so that one shift and one mask widen a whole row.
pub fn panel_position(dtype: DType, lane: usize) -> usize {
    match dtype {
        DType::Bf16 => lane % 16 * 2 + lane / 16,
        DType::F32 | DType::F16 => lane,
    }
}

/// The index of a lane's element k in a panel of bf16 matrix tiles.
pub fn tile_position(k: usize, lane: usize) -> usize {
    let tile = k / TILE_K * 2 + lane / 16;
    tile * TILE_K * 16 + k % TILE_K / 2 * 32 + lane % 16 * 2 + k % 2
}

/// The index of a lane's element k in a panel of 8-bit matrix tiles.
pub fn int8_position(k: usize, lane: usize) -> usize {
    let tile = k / INT8_TILE_K * 2 + lane / 16;
    tile * INT8_TILE_K * 16 + k % INT8_TILE_K / 4 * 64 + lane % 16 * 4 + k % 4
}

/// The sum of 16 partial sums, added pairwise: halves onto halves.
#[inline(always)]
pub fn sum_lanes(lanes: &[f32; 16]) -> f32 {
    let mut sums = *lanes;
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            sums[l] += sums[l + half];
        }
    }
    sums[0]
}

/// exp on [-87.3, 88] as 2ⁿ · p(r), |r| ≤ ln 2 / 2, with n ln 2 in two parts. p is the Taylor
/// polynomial of degree 7, whose error is below half a unit in the last place.
mod exp {
    pub const MIN: f32 = -87.3;
    pub const MAX: f32 = 88.0;
    pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
    pub const LN_2_HIGH: f32 = 0.693_359_4;
    pub const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// The coefficients, highest power first. The powers 1 and 0 have coefficient 1.
    pub const COEFFICIENTS: [f32; 6] = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    ];
}

/// Matches on a run-time number of rows, which is a constant in each arm.
macro_rules! with_rows {
    ($num_rows:expr, $M:ident in [$($m:literal)*], $call:expr) => {
        match $num_rows {
            $($m => { const $M: usize = $m; $call })*
            _ => unreachable!("there is no kernel for a tile of {} rows", $num_rows),
        }
    };
}
use with_rows;

#[cfg(test)]
mod tests;
