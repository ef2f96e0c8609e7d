//! What kernels for weights in groups share: how a panel lies, and what its numbers are.
//!
//! A panel is a sequence of groups. Each begins with the scales of its 32 lanes, then, if the
//! panel has them, their minimums, all f16; then come chunks of 32 k, line by line of 64 bytes.
//! A line holds four bytes of each of 16 lanes, as instructions for products of four bytes want
//! them. In 8 bits line `2 q + h` of a chunk has k `4 q` to `4 q + 3` of lanes `16 h` to `16 h + 15`.
//! In 4 bits line `2 p + h` has k `8 p` to `8 p + 3` of these lanes in the lower halves of its bytes,
//! and in the upper ones the four that follow, so that one shift and two masks are all it takes.

use super::{INT8_TILE_K, PANEL_LANES};

/// Inputs of a row whose integers are summed once for all panels. A group is some of them.
pub const CHUNK_K: usize = 32;
/// Of the scales, or the minimums, of a group.
pub const LANE_F16_BYTES: usize = PANEL_LANES * 2;

/// Bytes of a chunk of integers of so many bits.
pub const fn chunk_bytes(bits: usize) -> usize {
    CHUNK_K * PANEL_LANES * bits / 8
}

/// What is stored for 0 in weights without minimums.
pub const fn middle(bits: usize) -> i32 {
    1 << (bits - 1)
}

/// How a panel of weights in groups lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedShape {
    /// 4 or 8.
    pub bits: usize,
    pub num_chunks: usize,
    /// Chunks of a group: 1, 2 or 4. The last group may have fewer.
    pub group_chunks: usize,
    /// Only in 4 bits.
    pub has_minimum: bool,
}

impl GroupedShape {
    pub fn num_groups(self) -> usize {
        self.num_chunks.div_ceil(self.group_chunks)
    }

    /// Of a group's scales and minimums.
    pub fn head_bytes(self) -> usize {
        LANE_F16_BYTES * (1 + usize::from(self.has_minimum))
    }

    pub fn chunk_bytes(self) -> usize {
        chunk_bytes(self.bits)
    }

    /// From one group to the next.
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

    /// Where a lane's element `k` stands in its panel: a byte, and the lowest of its bits.
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

    /// Where a lane's scale of a group stands; its minimum follows `LANE_F16_BYTES` later.
    pub fn scale_position(self, group: usize, lane: usize) -> usize {
        group * self.group_bytes() + lane * 2
    }
}

/// Rows of 8-bit integers as `Int8Gemm` takes them, with the sums of their chunks.
#[derive(Clone, Copy)]
pub struct SummedRows {
    pub rows: *const u8,
    pub num_rows: usize,
    /// Chunk by chunk, of each the rows.
    pub sums: *const i32,
}

impl SummedRows {
    /// Some rows' integers of a chunk; those of the next row follow `INT8_TILE_K` bytes later.
    ///
    /// # Safety
    /// The chunk is inside the rows.
    #[inline(always)]
    pub unsafe fn chunk(&self, chunk: usize, first_row: usize) -> *const i8 {
        const CHUNKS: usize = INT8_TILE_K / CHUNK_K;
        let block = chunk / CHUNKS * self.num_rows + first_row;
        // SAFETY: the caller's promise.
        unsafe {
            let block = self.rows.add(block * INT8_TILE_K);
            block.add(chunk % CHUNKS * CHUNK_K).cast()
        }
    }

    /// The sums of a chunk, from a row on.
    ///
    /// # Safety
    /// The chunk is inside the rows.
    #[inline(always)]
    pub unsafe fn sums(&self, chunk: usize, first_row: usize) -> *const i32 {
        // SAFETY: the caller's promise.
        unsafe { self.sums.add(chunk * self.num_rows + first_row) }
    }
}

/// Rows, and room for what a panel makes of them: rows of 32, as many as a tile may have.
#[derive(Clone, Copy)]
pub struct GroupedTile {
    pub rows: SummedRows,
    pub out: *mut f32,
}

impl GroupedTile {
    /// Without rows.
    pub const NONE: Self = Self {
        rows: SummedRows {
            rows: std::ptr::null(),
            num_rows: 0,
            sums: std::ptr::null(),
        },
        out: std::ptr::null_mut(),
    };
}

/// Of each tile, `out[row][lane] = Σ_g scale[g][lane] * Σ_k rows[row][k] * q[k][lane]`, g ascending in f32 and
/// each group's sum an exact integer. The panel stores `q + middle(bits)`: q is from -8 to 7, or from
/// -128 to 127. With minimums it stores q, from 0 to 15, and to each group
/// `minimum[g][lane] * Σ_k rows[row][k]` is added. Where a processor fuses multiply and
/// add, each of these is one rounding. With `fetch_ahead` the panel comes from memory, and what lies
/// behind it is asked for in time.
pub type GroupedGemm =
    unsafe fn(tiles: &[GroupedTile], panel: *const u8, shape: GroupedShape, fetch_ahead: bool);
