//! The reason for which a model was not quantised.

use std::fmt;

use corella_model::{CheckpointError, DeviceError};

#[derive(Debug)]
pub enum QuantizeError {
    /// The options do not fit the model, or the run was interrupted.
    Config(String),
    Checkpoint(CheckpointError),
    Device(DeviceError),
}

impl fmt::Display for QuantizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(reason) => f.write_str(reason),
            Self::Checkpoint(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for QuantizeError {}

impl From<CheckpointError> for QuantizeError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(error)
    }
}

impl From<DeviceError> for QuantizeError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}
