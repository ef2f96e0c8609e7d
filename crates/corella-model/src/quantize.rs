//! Writes a checkpoint anew with its matrices quantised.

mod compensation;
mod matrix;
mod plan;
mod rounding;

pub use self::compensation::{Hessian, InverseFactor};
pub use self::matrix::QuantizedMatrix;
pub use self::plan::{Place, PlannedTensor, QuantizeFormat, QuantizePlan};
