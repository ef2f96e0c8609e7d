//! The offline quantiser: writes a checkpoint anew with its matrices as integers.
//!
//! `plan` decides the form of each tensor, `rounding` and `compensation` find the integers, `matrix` stores them, and
//! `folder` writes a whole model, layer by layer.

mod compensation;
mod folder;
mod matrix;
mod plan;
mod quantize_error;
mod rounding;

pub use compensation::InverseFactor;
pub use folder::{Calibration, QuantizeJob, QuantizeProgress, Quantized, quantize};
pub use matrix::QuantizedMatrix;
pub use plan::{PlannedTensor, QuantizeFormat, QuantizePlan, TensorScope};
pub use quantize_error::QuantizeError;
