//! The memory layouts of rows and weights that GEMM kernels read.

use corella_model::DType;

/// The number of output channels (lanes) of a weight panel.
pub const PANEL_LANES: usize = 32;
/// The number of k that one matrix tile of bf16 holds.
pub const TILE_K: usize = 32;
/// The number of k that one matrix tile of 8-bit integers holds.
pub const INT8_TILE_K: usize = 64;

/// The memory layout of a dense layer's input rows and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The layout of `Kernels::gemm`: f32 rows in tiles of several rows, each tile transposed to `[k][row]`.
    Columns,
    /// The layout of `Kernels::tile_gemm`: bf16 rows in tiles, each tile stored as `[k / 32][row][32]`.
    MatrixTiles,
    /// The layout of `Kernels::int8_gemm` and `Kernels::grouped_gemm`: int8 rows in tiles, each
    /// tile stored as `[k / 64][row][64]`. Each row also has a scale, known once the row is complete, and the sums of
    /// its chunks.
    Int8,
}

impl Form {
    /// The number of consecutive elements of a row that are contiguous in memory.
    pub fn block_k(self) -> usize {
        match self {
            Self::Columns => 1,
            Self::MatrixTiles => TILE_K,
            Self::Int8 => INT8_TILE_K,
        }
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
