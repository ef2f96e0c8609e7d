//! A checkpoint written anew with its matrices as integers: what becomes of each, and how.

mod compensation;
mod matrix;
mod plan;
mod rounding;

pub use self::compensation::{Hessian, InverseFactor};
pub use self::matrix::QuantizedMatrix;
pub use self::plan::{Place, PlannedTensor, QuantizeFormat, QuantizePlan};
