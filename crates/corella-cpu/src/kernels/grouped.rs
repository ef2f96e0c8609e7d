//! The common parts of the kernels for group-wise scaled weights: the layout of panels, and the encoding.
//!
//! A panel is a sequence of groups. Each group begins with the scales of its 32 lanes and, if the
//! panel has them, the minimums, all in f16. Then follow chunks of 32 k, in lines of 64 bytes.
//!
//! A line holds four bytes of each of 16 lanes, as instructions for products of four bytes need them. In 8 bits, line
//! `2 q + h` of a chunk has k `4 q` to `4 q + 3` of lanes `16 h` to `16 h + 15`. In 4 bits, line `2 p + h` has k `8 p`
//! to `8 p + 3` of these lanes in the lower halves of its bytes, and the following four k in the upper halves, so that
//! one shift and two masks unpack it.

use corella_model::FP4_LEVELS;

use super::{INT8_TILE_K, PANEL_LANES};

/// The number of k in a chunk. A row's integers are summed per chunk, once for all panels. A group is 1, 2 or 4 chunks.
pub const CHUNK_K: usize = 32;
/// The size of a group's scales, or of its minimums, in bytes.
pub const LANE_F16_BYTES: usize = PANEL_LANES * 2;

/// The size of a chunk of `bits`-bit weights, in bytes.
pub const fn chunk_bytes(bits: usize) -> usize {
    CHUNK_K * PANEL_LANES * bits / 8
}

/// Returns the integer that encodes 0 in weights without minimums. It is added to the weights so that none is negative.
pub const fn middle(bits: usize, is_fp4: bool) -> i32 {
    match is_fp4 {
        true => FP4_MIDDLE,
        false => 1 << (bits - 1),
    }
}

const FP4_MIDDLE: i32 = 12;

/// `FP4_LEVELS` plus their middle.
pub const RAISED_LEVELS: [u8; 16] = {
    let mut levels = [0; 16];
    let mut code = 0;
    while code < 16 {
        levels[code] = (FP4_LEVELS[code] as i32 + FP4_MIDDLE) as u8;
        code += 1;
    }
    levels
};

/// The layout of a panel of group-wise scaled weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedShape {
    /// The number of bits per weight, 4 or 8.
    pub bits: usize,
    pub num_chunks: usize,
    /// The number of chunks in a group: 1, 2 or 4. The last group may have fewer.
    pub group_chunks: usize,
    /// Whether groups have minimums; possible with 4 bits only.
    pub has_minimum: bool,
    /// Whether the 4 bits of a weight are an index in `FP4_LEVELS`.
    pub is_fp4: bool,
}

impl GroupedShape {
    pub fn middle(self) -> i32 {
        middle(self.bits, self.is_fp4)
    }

    pub fn num_groups(self) -> usize {
        self.num_chunks.div_ceil(self.group_chunks)
    }

    /// The size of a group's scales and minimums, in bytes.
    pub fn head_bytes(self) -> usize {
        LANE_F16_BYTES * (1 + usize::from(self.has_minimum))
    }

    pub fn chunk_bytes(self) -> usize {
        chunk_bytes(self.bits)
    }

    /// The distance between groups, in bytes.
    pub fn group_bytes(self) -> usize {
        self.head_bytes() + self.group_chunks * self.chunk_bytes()
    }

    pub fn panel_bytes(self) -> usize {
        self.num_groups() * self.head_bytes() + self.num_chunks * self.chunk_bytes()
    }

    /// The chunks of a group.
    pub fn chunks(self, group: usize) -> std::ops::Range<usize> {
        let first = group * self.group_chunks;
        first..self.num_chunks.min(first + self.group_chunks)
    }

    /// The place of a lane's element `k` in its panel: the index of a byte, and the element's lowest bit in the byte.
    pub fn position(self, k: usize, lane: usize) -> (usize, usize) {
        let group = k / CHUNK_K / self.group_chunks;
        let heads = (group + 1) * self.head_bytes();
        let quad = k % CHUNK_K / 4;
        let (line, bit) = match self.bits {
            4 => (quad / 2, quad % 2 * 4),
            _ => (quad, 0),
        };
        let byte = (line * 2 + lane / 16) * 64 + lane % 16 * 4 + k % 4;
        (heads + k / CHUNK_K * self.chunk_bytes() + byte, bit)
    }

    /// The place of a lane's scale of a group; its minimum is `LANE_F16_BYTES` bytes further on.
    pub fn scale_position(self, group: usize, lane: usize) -> usize {
        group * self.group_bytes() + lane * 2
    }
}

/// Rows of 8-bit integers in the layout of `Int8Gemm`, with the sums of their chunks.
#[derive(Clone, Copy)]
pub struct SummedRows {
    pub rows: *const u8,
    pub num_rows: usize,
    /// The sums of the chunks, `[chunk][row]`.
    pub sums: *const i32,
}

impl SummedRows {
    /// The integers of a chunk in a row; those of the next row are `INT8_TILE_K` bytes further on.
    ///
    /// # Safety
    /// The chunk and the row exist.
    #[inline(always)]
    pub unsafe fn chunk(&self, chunk: usize, first_row: usize) -> *const i8 {
        const CHUNKS: usize = INT8_TILE_K / CHUNK_K;
        let block = chunk / CHUNKS * self.num_rows + first_row;
        // SAFETY: the caller upholds the contract.
        unsafe {
            let block = self.rows.add(block * INT8_TILE_K);
            block.add(chunk % CHUNKS * CHUNK_K).cast()
        }
    }

    /// The sums of a chunk, from a row on.
    ///
    /// # Safety
    /// The chunk and the row exist.
    #[inline(always)]
    pub unsafe fn sums(&self, chunk: usize, first_row: usize) -> *const i32 {
        // SAFETY: the caller upholds the contract.
        unsafe { self.sums.add(chunk * self.num_rows + first_row) }
    }
}

/// A tile of activation rows, and memory for its outputs. The outputs are rows of 32, with room for the largest tile.
#[derive(Clone, Copy)]
pub struct GroupedTile {
    pub rows: SummedRows,
    pub out: *mut f32,
}

impl GroupedTile {
    /// A placeholder without rows.
    pub const NONE: Self = Self {
        rows: SummedRows {
            rows: std::ptr::null(),
            num_rows: 0,
            sums: std::ptr::null(),
        },
        out: std::ptr::null_mut(),
    };
}

/// For each tile, `out[row][lane] = Σ_g scale[g][lane] * Σ_k rows[row][k] * q[k][lane]`,
/// accumulated in f32 in ascending order of g; the sum over a group is an exact integer.
///
/// The panel stores `q + middle` for integers q from -8 to 7 or from -128 to 127. If q is one of `FP4_LEVELS`, the
/// panel stores the index of the level. With minimums it stores q itself, from 0 to 15, and
/// `minimum[g][lane] * Σ_k rows[row][k]` is added for each group. Where a processor fuses multiply and add, each of
/// these additions is rounded once. With `fetch_ahead` the panel comes from memory, and the kernel prefetches the
/// memory after it. Without `fetch_ahead`, a kernel may prefetch if that is faster.
pub type GroupedGemm =
    unsafe fn(tiles: &[GroupedTile], panel: *const u8, shape: GroupedShape, fetch_ahead: bool);
