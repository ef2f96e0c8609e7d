//! Dense layers: rows of activations, multiplied by packed weights.

mod buffer;
mod epilogue;
mod gemm;
mod grid;
mod packed_rows;
mod tiles;
mod update;

pub use self::buffer::Buffer;
pub use self::epilogue::Epilogue;
pub use self::gemm::{Part, gemm, shared_gemm};
pub use self::grid::Grid;
pub use self::packed_rows::PackedRows;
pub use self::tiles::Tiles;
pub use self::update::{Updates, Weights};
