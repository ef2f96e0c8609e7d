//! The memory layouts of rows and weights that GEMM kernels read.

use super::{INT8_TILE_K, TILE_K};

/// The memory layout of a dense layer's input rows and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The layout of `Kernels::gemm`: f32 rows in tiles of several rows, each tile transposed to
    /// `[k][row]`.
    Columns,
    /// The layout of `Kernels::tile_gemm`: bf16 rows in tiles, each tile stored as
    /// `[k / 32][row][32]`.
    MatrixTiles,
    /// The layout of `Kernels::int8_gemm` and `Kernels::grouped_gemm`: int8 rows in tiles, each
    /// tile stored as `[k / 64][row][64]`. Beside them lie each row's scale, which is known once
    /// the row is complete, and the sums of its chunks.
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
