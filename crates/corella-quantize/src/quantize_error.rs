//! The reason for which a model was not quantised.

use corella_model::{CheckpointError, DeviceError};

#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The options do not fit the model, or the run was interrupted.
    #[error("{0}")]
    Config(String),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}
