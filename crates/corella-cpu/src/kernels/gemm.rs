//! Matrix products: what a GEMM kernel of any instruction set takes and writes.

use super::peak::Peak;
use super::prefetch::Prefetch;

/// The largest number of rows in a tile of any table, matrix tiles aside.
pub const MAX_TILE_ROWS: usize = 14;
/// The largest number of rows in a pair of matrix tiles.
pub const MAX_MATRIX_ROWS: usize = 32;
/// The number of cache lines that a block of more than 16 rows prefetches of the next panel.
pub const NEXT_LINES: usize = 4;
/// Up to this many rows, a GEMM is bound by memory. Kernels then read line after line, as hardware
/// prefetchers expect, and not two lines for each k.
pub const FEW_ROWS: usize = 8;

/// `out[row][lane] = Σ_k a[k][row] * panel[k][lane]`, accumulated in ascending order of k. `a` is `[k][num_rows]`. With
/// `fetch_ahead` the panel comes from memory, and the kernel prefetches the memory after it.
pub type Gemm = unsafe fn(
    a: *const f32,
    num_rows: usize,
    panel: *const u8,
    k: usize,
    fetch_ahead: bool,
    out: *mut f32,
);

/// The GEMM of bf16 rows and bf16 weights, and the kernels that accompany it.
#[derive(Clone, Copy)]
pub struct TileRows {
    /// The largest number of rows that the GEMM takes.
    pub max_rows: usize,
    pub gemm: TileGemm,
    /// `Kernels::silu_mul` with outputs in bf16, whose rows are `TILE_K` elements apart.
    pub silu_mul: unsafe fn(x: *const f32, num_rows: usize, out: *mut u16),
    /// `Kernels::silu_mul` with outputs in f32, whose rows are `stride` elements apart.
    pub silu_mul_wide: unsafe fn(x: *const f32, num_rows: usize, out: *mut f32, stride: usize),
    /// `Kernels::weigh` with outputs in bf16, in blocks of `TILE_K` elements that are `stride` elements apart.
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
    /// To be called after the last GEMM in a thread: threads without tile data are cheaper to switch.
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
    /// The address from which `NEXT_LINES` lines per block are prefetched; null prefetches nothing.
    pub next: *const u8,
    pub out: *mut u32,
    pub out_bytes: usize,
}

/// `out[row][lane] = Σ_k rows[row][k] * panel[k][lane]` for up to `max_rows` rows of bf16.
///
/// `rows` is `[k / 32][row][32]`. `panel` has two tiles per block of 32 k, for lanes 0–15 and 16–31, each `[pair of
/// k][lane][2]`. Rows of `out` are `out_bytes` apart. The thread's tiles must be configured for `num_rows` rows.
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
