//! The table of kernels that each instruction set fills in.
//!
//! Files of this folder hold the same functions in the same order. Within one table a value
//! is computed by one sequence of roundings, whatever the number of rows, panels or threads
//! around it. Tables may differ from each other in the last bits.
#![expect(
    clippy::needless_range_loop,
    reason = "an index names the same row or lane in several arrays"
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_attention;
#[cfg(target_arch = "x86_64")]
mod amx_part;
#[cfg(target_arch = "x86_64")]
mod amx_products;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16_attention;
mod elementwise;
#[cfg(all(feature = "emulated-tiles", target_arch = "x86_64"))]
mod emulated_tiles;
pub mod grouped;
#[cfg(target_arch = "x86_64")]
mod grouped_amx;
#[cfg(target_arch = "x86_64")]
mod grouped_avx2;
#[cfg(target_arch = "x86_64")]
mod grouped_avx512;
mod grouped_portable;
mod hadamard;
#[cfg(target_arch = "x86_64")]
mod in_place_attention;
mod isa;
mod line_queue;
mod portable;
mod processor;
mod products;
mod requests;
#[cfg(target_arch = "x86_64")]
mod tile_kv;
#[cfg(target_arch = "x86_64")]
mod tile_softmax;

pub use self::hadamard::HADAMARD_ORDER;
pub use self::isa::{Isa, detect_isa, is_supported, kernels};
pub use self::line_queue::{LineQueue, fetch_line};
pub use self::processor::wants_requests;
pub use self::products::{PRODUCT_LANES, add_products};
pub use self::requests::Requests;
#[cfg(target_arch = "x86_64")]
use self::requests::{in_steps, line_ahead};

use std::ops::Range;

use corella_model::{DType, KvFormat};

use crate::buffer::Form;
use grouped::GroupedGemm;

/// Output lanes of a weight panel.
pub const PANEL_LANES: usize = 32;
/// Rows of the largest tile of any table, matrix tiles aside.
pub const MAX_TILE_ROWS: usize = 14;
/// Rows of the largest pair of matrix tiles.
pub const MAX_MATRIX_ROWS: usize = 32;
/// Cache lines of weights that a block of more than 16 rows asks for.
pub const NEXT_LINES: usize = 4;
/// Up to so many rows, weights come from memory more slowly than rows are multiplied with them: kernels
/// read line after line, as hardware expects, rather than two lines for each element of a row.
pub const FEW_ROWS: usize = 8;
/// Inputs of a row that one matrix tile holds.
pub const TILE_K: usize = 32;
/// The same in 8-bit integers.
pub const INT8_TILE_K: usize = 64;
/// Positions that the softmax takes in one go, counted from position 0 of the sequence.
pub const ATTENTION_BLOCK: usize = 64;
/// Positions, or head dimensions, that attention computes side by side. Reads of KV rows run
/// up to this many elements past their end.
pub const ATTENTION_LANES: usize = 16;

/// Every function needs the instruction set of its table and valid pointers for the extents
/// it names.
pub struct Kernels {
    /// Rows of a full tile.
    pub tile_rows: usize,
    pub gemm: ByFormat<Gemm>,
    /// Where the processor multiplies bf16: for bf16 weights, which then lie in tiles, and rows that
    /// are rounded to bf16.
    pub tile_gemm: Option<TileRows>,
    /// Takes `tile_rows` rows at once; with `tile_gemm`, as many as that.
    pub int8_gemm: Int8Gemm,
    /// Takes as many rows as `int8_gemm`; `out` has room for so many.
    pub grouped_gemm: GroupedGemm,
    /// Returns the sum of the integers.
    pub quantise_row: unsafe fn(QuantiseRow) -> i32,
    /// Groups of `group_len`, a multiple of 16, as integers from 0 to 15 and a scale: `x[i]` is about
    /// `scale * (q[i] - 8)`.
    pub quantise_groups:
        unsafe fn(x: *const f32, num_groups: usize, group_len: usize, q: *mut u8, scales: *mut f32),
    /// The largest magnitude, by its bits: NaN and infinity come out as no finite number does.
    pub largest_bits: unsafe fn(x: *const f32, n: usize) -> u32,
    /// `out[i] = round(x[i] * scale)`, ties to even; what does not fit in 8 bits gives anything.
    pub quantise: unsafe fn(x: *const f32, n: usize, scale: f32, out: *mut i8),
    /// `x` times a Hadamard matrix of order `HADAMARD_ORDER`, of which `n` is a multiple, in place.
    /// Twice gives `x` again.
    pub hadamard: unsafe fn(x: *mut f32, n: usize),
    /// `out[row][lane] = sums[row][lane] * row_scales[row] * lane_scales[lane]` for the lanes of a
    /// panel; rows of `out`, which may be `sums`, are `stride` apart.
    pub scale_sums: unsafe fn(
        sums: *const i32,
        num_rows: usize,
        row_scales: *const f32,
        lane_scales: *const f32,
        out: *mut f32,
        stride: usize,
    ),
    /// As `scale_sums`, of f32.
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
    /// `out` may be what is read.
    pub norm_rotate: unsafe fn(NormRotate, out: *mut f32),
    /// To bf16, nearest even.
    pub round: unsafe fn(x: *const f32, n: usize, out: *mut u16),
    /// `out[row][lane] += x[row][lane]` for the lanes of a panel; rows of `out` are `stride` apart.
    pub add_lanes: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// `out[row][i] = silu(x[row][i]) * x[row][16 + i]` for `i < 16`; rows of `x` have 32
    /// elements, those of `out` 16.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32),
    pub scores: ByKvFormat<Scores>,
    /// Turns one row's `ATTENTION_BLOCK` scores into weights `exp(score - max)`, of which all
    /// but the first `limit` are 0. Updates the running maximum and the 16 running sums and
    /// returns the factor by which everything accumulated before must shrink.
    pub softmax_block:
        unsafe fn(scores: *mut f32, limit: usize, max: &mut f32, sums: *mut f32) -> f32,
    pub values: ByKvFormat<Values>,
    /// Where the processor multiplies bf16: for KV that bf16 holds, and queries and weights that are
    /// rounded to bf16.
    pub tile_attention: Option<TileAttention>,
    /// Independent chains of multiply-adds that no memory slows down; each iteration does
    /// `peak_flops` operations.
    pub peak: unsafe fn(iterations: usize) -> f32,
    pub peak_flops: usize,
    /// The same for products of 8-bit integers, where there are instructions for them.
    pub int8_peak: Option<Peak>,
    /// Reads `len` bytes (a multiple of 4096) as fast as it can, with `fetch_ahead` as in [`Gemm`].
    pub read: unsafe fn(bytes: *const u8, len: usize, fetch_ahead: bool) -> u32,
}

impl Kernels {
    pub fn attention_through_tiles(&self, head_dim: usize, kv: KvFormat) -> Option<&TileAttention> {
        let is_exact = matches!(kv, KvFormat::Float(DType::Bf16) | KvFormat::Int8);
        let fits = is_exact && head_dim.is_multiple_of(TILE_K);
        self.tile_attention.as_ref().filter(|_| fits)
    }

    /// Rows that a GEMM takes at once.
    pub fn rows_at_once(&self, form: Form) -> usize {
        match (form, &self.tile_gemm) {
            (Form::MatrixTiles | Form::Int8, Some(tiles)) => tiles.max_rows,
            _ => self.tile_rows,
        }
    }
}

/// `out[row][lane] = Σ_k a[k][row] * panel[k][lane]`, k ascending in each lane. `a` holds
/// `num_rows` values for each of `k` steps. With `fetch_ahead` the panel comes from memory,
/// and what lies behind it is asked for in time.
pub type Gemm = unsafe fn(
    a: *const f32,
    num_rows: usize,
    panel: *const u8,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
);

/// Instructions that depend on nothing but each other.
#[derive(Clone, Copy)]
pub struct Peak {
    pub run: unsafe fn(iterations: usize),
    /// Of an iteration.
    pub ops: usize,
}

/// A GEMM of bf16.
#[derive(Clone, Copy)]
pub struct TileRows {
    /// Rows that it takes at once.
    pub max_rows: usize,
    pub gemm: TileGemm,
    /// As `Kernels::silu_mul`, with products in bf16 and rows `TILE_K` apart.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut u16),
    /// The same in f32, rows `stride` elements apart.
    pub silu_mul_wide: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// As `Kernels::weigh`, of blocks of `TILE_K` elements, which lie `stride` elements apart in bf16.
    pub weigh: unsafe fn(
        x: *const f32,
        weight: *const f32,
        scale: f32,
        n: usize,
        out: *mut u16,
        stride: usize,
    ),
    /// Puts `num_blocks` times `TILE_K` weights of 16 lanes into their half of a panel as `gemm` reads it,
    /// `to` aligned to a cache line.
    pub pack: unsafe fn(lanes: [*const u8; 16], num_blocks: usize, to: *mut u8),
    /// Asks for the first `num_lines` cache lines of some rows, `stride` bytes apart, which `gemm`
    /// would wait for when it writes them. May name any address.
    pub fetch_to_write: fn(first: *const f32, num_rows: usize, stride: usize, num_lines: usize),
    pub peak: Peak,
    /// Where the processor has matrix tiles.
    pub unit: Option<TileUnit>,
}

/// The processor's unit for matrix tiles.
#[derive(Clone, Copy)]
pub struct TileUnit {
    /// Before the first call of a GEMM in a thread, and whenever the number of rows changes.
    pub configure: unsafe fn(num_rows: usize),
    pub gemm_part: unsafe fn(&TilePart),
    /// As `Kernels::int8_gemm`.
    pub int8_gemm_part: unsafe fn(&TilePart),
    /// After the last: a thread without tiles is cheaper to switch.
    pub release: unsafe fn(),
}

/// A [`TileGemm`], or [`Int8Gemm`], over some blocks of k, for rows that are many. Sums are f32, or
/// integers of 32 bits.
pub struct TilePart {
    pub rows: *const u8,
    pub num_rows: usize,
    pub panel: *const u8,
    pub num_blocks: usize,
    /// Of the blocks before, `num_rows` rows of 32; null for none. May be `out`.
    pub sums: *const u32,
    /// From where to ask for `NEXT_LINES` lines a block; null for nowhere.
    pub next: *const u8,
    pub out: *mut u32,
    pub out_bytes: usize,
}

/// `out[row][lane] = Σ_k rows[row][k] * panel[k][lane]` for up to `max_rows` rows of bf16, k by k
/// in blocks of 32. For each block there are 64 bytes of each row, and of the panel two tiles,
/// lanes 0–15 and 16–31: 16 pairs of k, of each pair the 16 lanes, of each lane its two elements.
/// Rows of `out` are `out_bytes` apart. The thread's tiles are configured for so many rows.
pub type TileGemm = unsafe fn(
    rows: *const u8,
    num_rows: usize,
    panel: *const u8,
    num_blocks: usize,
    requests: Requests,
    out: *mut f32,
    out_bytes: usize,
);

/// A tile of rows of 8-bit integers.
#[derive(Clone, Copy)]
pub struct Int8Rows {
    pub rows: *const u8,
    pub num_rows: usize,
    /// Of each row's integers.
    pub sums: *const i32,
}

/// As [`TileGemm`] with 8-bit integers of at most 127 in magnitude and exact sums, k by k in blocks
/// of 64: for each block 64 bytes of each row, and of the panel two tiles, of 16 times 4 k, of those
/// the 16 lanes, of each lane its 4 elements.
pub type Int8Gemm = unsafe fn(
    rows: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    requests: Requests,
    out: *mut i32,
    out_bytes: usize,
);

/// Scores of consecutive positions that lie side by side in one page.
#[derive(Clone, Copy)]
pub struct KeyGroup {
    /// Dimension 0 of the first position.
    pub keys: *const u8,
    /// At most `ATTENTION_LANES`.
    pub num_positions: usize,
    /// Where their scores go in a row of `ATTENTION_BLOCK`.
    pub offset: usize,
}

/// `out[row][offset + lane] = Σ_i q[i][row] * keys[i][lane]`, i ascending; a key's next
/// dimension is `stride` bytes on.
pub type Scores = unsafe fn(
    q: *const f32,
    num_rows: usize,
    groups: &[KeyGroup],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
);

/// Values of consecutive positions of one page, one row of `head_dim` after the other.
#[derive(Clone, Copy)]
pub struct ValueRun {
    pub values: *const u8,
    pub num_positions: usize,
}

/// `out[row] = out[row] * scale[row] + Σ_j weights[row][j] * values[j]`, j ascending over the
/// runs. Rows of `weights` have `ATTENTION_BLOCK` elements, rows of `out` `out_stride`, which
/// is `head_dim` rounded up to `ATTENTION_LANES`.
pub type Values = unsafe fn(
    weights: *const f32,
    num_rows: usize,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    out: *mut f32,
    out_stride: usize,
);

/// Positions that attention through matrix tiles weighs values of in one go, counted from position
/// 0 of the sequence.
pub const TILE_ATTENTION_BLOCK: usize = 256;
/// Positions that its softmax takes in one go.
pub const TILE_SOFTMAX_BLOCK: usize = 64;
/// Rows for which keys and values are not worth a copy.
pub const IN_PLACE_ROWS: usize = 8;
/// Positions of a tile of keys.
pub const KEY_TILE: usize = 16;
/// Positions of a tile of values, or of weights.
pub const VALUE_TILE: usize = 32;
/// Rows of queries that share tiles.
pub const QUERY_TILE_ROWS: usize = 32;
/// Elements between tiles of weights: of each row 32, one row after the other.
pub const ROW_TILE_LEN: usize = QUERY_TILE_ROWS * 32;

/// `Kernels::quantise` of a row into its tile, `INT8_TILE_K` elements by `INT8_TILE_K`, zeros behind the
/// last; and the sums of its chunks of integers.
pub struct QuantiseRow {
    pub x: *const f32,
    pub n: usize,
    pub scale: f32,
    /// The row's first block.
    pub out: *mut i8,
    /// Of its first chunk, or null; those of the tile's rows stand together.
    pub sums: *mut i32,
    pub num_rows: usize,
}

/// A head's RMS norm, unless `weight` is null, and rotation: of element i against the one half a head
/// behind it.
#[derive(Clone, Copy)]
pub struct NormRotate {
    pub x: *const f32,
    /// As many as the head has elements.
    pub weight: *const f32,
    pub eps: f32,
    /// Cosines of half a head, then sines.
    pub angles: *const f32,
    pub head_dim: usize,
}

/// Attention of up to `QUERY_TILE_ROWS` rows through matrix tiles.
#[derive(Clone, Copy)]
pub struct TileAttention {
    /// Before all else in a thread, and whenever the number of rows changes.
    pub configure: unsafe fn(num_rows: usize),
    /// As `Kernels::norm_rotate`, to bf16.
    pub norm_rotate_rounded: unsafe fn(NormRotate, out: *mut u16),
    pub store_keys: StoreRows,
    pub store_values: StoreRows,
    pub scores: TileScores,
    /// Computes products meanwhile, for which the thread's tiles are configured.
    pub softmax: unsafe fn(TileSoftmax<'_>, &[TileProduct]),
    /// Puts up to `KEY_TILE` positions, pairs of which lie `head_dim * 4` bytes apart, into a half of
    /// a tile of values as `TileValues` reads them, and zeros behind them. Asks for some lines meanwhile.
    pub copy_values: CopyValues,
    /// The same from 8-bit integers.
    pub widen_values: CopyValues,
    /// Turns a tile of keys in 8-bit integers, pairs of dimensions `stride` bytes apart, into one in
    /// bf16. Asks for some lines meanwhile.
    pub widen_keys: unsafe fn(
        from: *const u8,
        stride: usize,
        head_dim: usize,
        to: *mut u16,
        lines: &mut LineQueue,
    ),
    pub values: TileValues,
    pub in_place: Option<InPlaceAttention>,
    /// The same from 8-bit integers.
    pub int8_in_place: Option<InPlaceAttention>,
    /// One row of `out`, from its first dimension on, divided by its sums. What is 0 is not -0, which
    /// positions that the row may not see could have hidden.
    pub store_row: unsafe fn(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut f32),
    /// The same to bf16, in blocks of `TILE_K` elements, `stride` elements apart.
    pub store_rounded:
        unsafe fn(out: *const f32, sums: &RowSums, head_dim: usize, to: *mut u16, stride: usize),
    /// After the last: a thread without tiles is cheaper to switch.
    pub release: unsafe fn(),
}

/// `out[row][16 g + p] = Σ_i q[row][i] * keys[g][i][p]`, for 16 positions p of each tile g, of which
/// there are an even number and at most `TILE_SOFTMAX_BLOCK` positions. Queries are bf16, `q_stride` bytes
/// from row to row; keys pairs of dimensions, `stride` bytes from one to the next, of each pair the
/// positions, of each position its two elements. Rows of `out` have `TILE_SOFTMAX_BLOCK` elements.
/// Up to 16 rows ask for some lines meanwhile.
pub type TileScores = unsafe fn(
    q: *const u16,
    num_rows: usize,
    q_stride: usize,
    keys: KeyTiles<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
);

/// Tiles of `KEY_TILE` keys each, pairs of dimensions `stride` bytes apart.
#[derive(Clone, Copy)]
pub struct KeyTiles<'a> {
    pub tiles: &'a [*const u8],
    pub stride: usize,
    pub head_dim: usize,
}

/// Rows of bf16 times 32 columns, `TILE_K` inner elements of both in a block: scores as in `TileScores`,
/// or values as in `TileValues`. For more than 16 rows, and for as many as tiles are configured for.
#[derive(Clone, Copy)]
pub struct TileProduct {
    /// Of the first block; the next is `a_step` bytes on.
    pub a: *const u8,
    /// Bytes from row to row.
    pub a_stride: usize,
    pub a_step: usize,
    /// Columns 0–15 and 16–31 of the first block.
    pub b: [*const u8; 2],
    /// Bytes from one pair of inner elements to the next.
    pub b_stride: usize,
    pub b_step: usize,
    pub num_blocks: usize,
    pub out: *mut f32,
    /// Bytes from row to row.
    pub out_stride: usize,
    /// Bytes to column 16.
    pub right: usize,
    /// Bytes to row 16.
    pub below: usize,
    /// Whether `out` is added to.
    pub adds: bool,
}

/// Rounds rows, `stride` elements apart, into positions of a tile: of keys, pairs of dimensions
/// `tile_stride` bytes apart, or of values, pairs of positions.
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

/// What a row of queries has accumulated, besides its output.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct RowSums {
    /// Of weights, lane by lane.
    pub sums: [f32; 16],
    /// Weights are 2 to the power of what a score, in powers of 2, exceeds this by. A whole number,
    /// raised when a score exceeds it by more than 16, so that all there is shrinks exactly.
    pub reference: f32,
}

impl RowSums {
    pub const NONE: Self = Self {
        sums: [0.0; 16],
        reference: f32::NEG_INFINITY,
    };
}

/// Turns scores of `TILE_SOFTMAX_BLOCK` positions into weights in bf16, and shrinks what was
/// accumulated before where it must.
pub struct TileSoftmax<'a> {
    pub scores: *const f32,
    /// Scores are still to be multiplied by this.
    pub scale: f32,
    /// Multiply keys and values of the positions, if these are integers.
    pub scales: Option<[*const f32; 2]>,
    /// Of these positions on, in the sequence.
    pub start: usize,
    /// Up to where in the sequence each row may see, ascending. Positions behind weigh 0.
    pub ends: &'a [usize],
    pub rows: &'a mut [RowSums],
    /// Tiles of the `TILE_ATTENTION_BLOCK`.
    pub weights: *mut u16,
    pub head_dim: usize,
    /// As in `TileValues`.
    pub out: *mut f32,
}

/// `out[row] += Σ_j weights[row][j] * values[j]`, over some tiles of values, of 16 dimensions
/// by 16 dimensions: pairs of positions, of each pair the dimensions, of each dimension its two
/// elements. Dimensions of `out` lie 16 by 16 too, of those rows 0–15, then 16–31. Of these only
/// `dims` are computed, which begin and end at multiples of 32. Up to 16 rows ask for some
/// lines meanwhile.
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

/// For up to `IN_PLACE_ROWS` rows, keys and values as they lie in pages.
#[derive(Clone, Copy)]
pub struct InPlaceAttention {
    pub scores: TileScores,
    pub values: TileValuesInPlace,
}

/// As [`TileValues`], of all dimensions, and of values as [`TileAttention::store_values`] leaves them, or
/// 8-bit integers in the same places.
pub type TileValuesInPlace = unsafe fn(
    weights: *const u16,
    num_rows: usize,
    values: PageValues<'_>,
    out: *mut f32,
    lines: &mut LineQueue,
);

/// Tiles of `KEY_TILE` values each, the last one perhaps with fewer.
#[derive(Clone, Copy)]
pub struct PageValues<'a> {
    pub tiles: &'a [*const u8],
    /// Of all tiles.
    pub num_positions: usize,
    pub head_dim: usize,
}

/// Where dimension i of a row of `out` is.
pub fn tile_out_index(row: usize, i: usize) -> usize {
    (i / 16 * 2 + row / 16) * 256 + row % 16 * 16 + i % 16
}

/// Where dimension i of a position of a tile of values is.
pub fn tile_value_index(position: usize, i: usize) -> usize {
    i / 16 * 512 + position / 2 * 32 + i % 16 * 2 + position % 2
}

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

/// One of each format of keys and values.
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
/// Of keys and values.
const INT8: u8 = 3;

const fn element_size(format: u8) -> usize {
    match format {
        F32 => 4,
        INT8 => 1,
        _ => 2,
    }
}

/// Where a lane's element stands in a panel row. Two lanes 16 apart share a 32-bit word in
/// bf16, so that one shift and one mask widen a whole row.
pub fn panel_position(dtype: DType, lane: usize) -> usize {
    match dtype {
        DType::Bf16 => lane % 16 * 2 + lane / 16,
        DType::F32 | DType::F16 => lane,
    }
}

/// Where a lane's element k stands in a panel of matrix tiles.
pub fn tile_position(k: usize, lane: usize) -> usize {
    let tile = k / TILE_K * 2 + lane / 16;
    tile * TILE_K * 16 + k % TILE_K / 2 * 32 + lane % 16 * 2 + k % 2
}

/// The same for 8-bit integers.
pub fn int8_position(k: usize, lane: usize) -> usize {
    let tile = k / INT8_TILE_K * 2 + lane / 16;
    tile * INT8_TILE_K * 16 + k % INT8_TILE_K / 4 * 64 + lane % 16 * 4 + k % 4
}

/// Σ of 16 partial sums, halves onto halves.
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

/// exp on [-87.3, 88]: 2ⁿ · p(r), |r| ≤ ln 2 / 2, with n ln 2 in two parts. p is the Taylor
/// polynomial of degree 7, whose error is below half a unit in the last place.
mod exp {
    pub const MIN: f32 = -87.3;
    pub const MAX: f32 = 88.0;
    pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
    pub const LN_2_HIGH: f32 = 0.693_359_4;
    pub const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// Highest power first; the powers 1 and 0 have coefficient 1.
    pub const COEFFICIENTS: [f32; 6] = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    ];
}

/// `match` on a run-time row count, with the count as a constant in each arm.
macro_rules! with_rows {
    ($num_rows:expr, $M:ident in [$($m:literal)*], $call:expr) => {
        match $num_rows {
            $($m => { const $M: usize = $m; $call })*
            _ => unreachable!("a tile of {} rows", $num_rows),
        }
    };
}
use with_rows;

#[cfg(test)]
mod tests;
