//! Dense layers: rows of activations, multiplied by packed weights.

mod buffer;
mod gemm;
mod grid;

pub use self::buffer::{Buffer, PackedRows, Tiles};
pub use self::gemm::{Epilogue, Part, gemm, shared_gemm};
pub use self::grid::Grid;
