//! Attention by matrix tiles: what its kernels take and write.

use std::ops::Range;

use super::elementwise::NormRotate;
use super::line_queue::LineQueue;

/// The number of positions in a block of attention with matrix tiles, counted from position 0 of the sequence.
pub const TILE_ATTENTION_BLOCK: usize = 256;
/// The number of positions that one softmax takes in attention with matrix tiles.
pub const TILE_SOFTMAX_BLOCK: usize = 64;
/// Up to this number of rows, copies of keys and values cost more time than they save.
pub const IN_PLACE_ROWS: usize = 8;
/// The number of positions in a tile of keys.
pub const KEY_TILE: usize = 16;
/// The number of positions in a tile of values, or of weights.
pub const VALUE_TILE: usize = 32;
/// The number of query rows that share tiles.
pub const QUERY_TILE_ROWS: usize = 32;
/// The distance between tiles of weights, in elements. A tile is `[row][32]`.
pub const ROW_TILE_LEN: usize = QUERY_TILE_ROWS * 32;

/// Attention of up to `QUERY_TILE_ROWS` rows with matrix tiles.
#[derive(Clone, Copy)]
pub struct TileAttention {
    /// To be called before all other functions in a thread, and whenever the number of rows changes.
    pub configure: unsafe fn(num_rows: usize),
    /// `Kernels::norm_rotate` with the output rounded to bf16.
    pub norm_rotate_rounded: unsafe fn(NormRotate, out: *mut u16),
    pub store_keys: StoreRows,
    pub store_values: StoreRows,
    pub scores: TileScores,
    /// Computes the softmax and, at the same time, products for which the thread's tiles are configured.
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
    /// `store_row` with the output in bf16, in blocks of `TILE_K` elements that are `stride` elements apart.
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

/// The product of bf16 rows and 32 columns, in blocks of `TILE_K` inner elements: scores as in `TileScores`, or values
/// as in `TileValues`. There are more than 16 rows: the number that the tiles are configured for.
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
    /// An exponent: a position with score s has weight 2^(s·log₂ e - `reference`). An exponent s·log₂ e that exceeds
    /// the reference by more than 16 raises the reference. It is an integer, so that rescaling is exact.
    pub reference: f32,
}

impl RowSums {
    pub const NONE: Self = Self {
        sums: [0.0; 16],
        reference: f32::NEG_INFINITY,
    };

    /// The sums of a row that has seen only this score.
    pub fn of_sink(sink: f32) -> Self {
        let power = sink * std::f32::consts::LOG2_E;
        let mut row = Self {
            reference: power.ceil(),
            ..Self::NONE
        };
        row.sums[0] = (power - row.reference).exp2();
        row
    }
}

/// One softmax block: scores of `TILE_SOFTMAX_BLOCK` positions, which become weights in bf16. If a row's reference
/// rises, its earlier sums are rescaled.
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
