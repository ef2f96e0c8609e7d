//! All errors, in words for the person who can correct them.

pub(crate) mod display_bytes;
pub(crate) mod option_name;

use corella_core::{AdmissionError, ConfigError, RequestError};
use corella_engine::{EngineError, SubmitError};
use corella_model::{CheckpointError, DeviceError};
use corella_quantize::QuantizeError;
use corella_text::TextError;

use crate::error::option_name::in_options;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that contradict each other, the model or the machine.
    #[error("{0}")]
    Config(String),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Engine(EngineError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
}

impl From<QuantizeError> for Error {
    fn from(error: QuantizeError) -> Self {
        match error {
            QuantizeError::Config(reason) => Self::Config(reason),
            QuantizeError::Checkpoint(error) => Self::Checkpoint(error),
            QuantizeError::Device(error) => Self::Device(error),
        }
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Self::Config(in_options(&error))
    }
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Config(error) => error.into(),
            error => Self::Engine(error),
        }
    }
}

impl From<AdmissionError> for Error {
    fn from(error: AdmissionError) -> Self {
        Self::Submit(SubmitError::Refused(error))
    }
}
