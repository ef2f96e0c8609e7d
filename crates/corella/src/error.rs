//! All errors, in words for the person who can correct them.

pub(crate) mod display_bytes;
pub(crate) mod option_name;

use std::fmt;

use corella_core::{AdmissionError, ConfigError, RequestError};
use corella_engine::{EngineError, SubmitError};
use corella_model::{CheckpointError, DeviceError};
use corella_quantize::QuantizeError;
use corella_text::TextError;

use crate::error::option_name::in_options;

#[derive(Debug)]
pub enum Error {
    /// Options that contradict each other, the model or the machine.
    Config(String),
    Checkpoint(CheckpointError),
    Text(TextError),
    Device(DeviceError),
    Engine(EngineError),
    Submit(SubmitError),
    Request(RequestError),
    Io(String, std::io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(reason) => f.write_str(reason),
            Self::Checkpoint(error) => error.fmt(f),
            Self::Text(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Engine(error) => error.fmt(f),
            Self::Submit(error) => error.fmt(f),
            Self::Request(error) => error.fmt(f),
            Self::Io(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<TextError> for Error {
    fn from(error: TextError) -> Self {
        Self::Text(error)
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(error)
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
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

impl From<SubmitError> for Error {
    fn from(error: SubmitError) -> Self {
        Self::Submit(error)
    }
}

impl From<AdmissionError> for Error {
    fn from(error: AdmissionError) -> Self {
        Self::Submit(SubmitError::Refused(error))
    }
}

impl From<RequestError> for Error {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}
