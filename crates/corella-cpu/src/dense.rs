//! Dense layers: rows of activations, multiplied by packed weights.

mod buffer;
mod gemm;
mod grid;
mod packed_rows;
mod tiles;

pub use self::buffer::Buffer;
pub use self::gemm::{Epilogue, Part, Updates, Weights, gemm, shared_gemm};
pub use self::grid::Grid;
pub use self::packed_rows::PackedRows;
pub use self::tiles::Tiles;
