//! The errors of an engine that does not start, or refuses a command.

use std::fmt;

use corella_core::{AdmissionError, ConfigError, PinError};
use corella_model::{ExecutorError, KvLayout};

/// The reason for refusing a submission. The engine keeps no part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitError {
    QueueFull {
        num_waiting: usize,
        limit: u32,
    },
    Draining,
    Lost(String),
    /// The request could never run.
    Refused(AdmissionError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResetError {
    /// Requests still hold pages of the cache.
    Busy,
    Lost(String),
}

/// The reason for which a prefix was not pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinPrefixError {
    /// The prefix could not be computed.
    Submit(SubmitError),
    Pin(PinError),
}

/// The reason for which an engine did not start.
#[derive(Debug)]
pub enum EngineError {
    Config(ConfigError),
    /// The executor's KV pool differs from the scheduler's configuration.
    KvLayout {
        layout: KvLayout,
        num_pages: u32,
        page_size: u32,
    },
    WarmUp(ExecutorError),
    Thread(std::io::Error),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueFull { num_waiting, limit } => {
                let full = AdmissionError::QueueFull {
                    num_waiting: *num_waiting,
                    limit: *limit,
                };
                full.fmt(f)
            }
            Self::Draining => f.write_str("the engine is shutting down and takes no new requests"),
            Self::Lost(reason) => write!(f, "the engine has stopped: {reason}"),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SubmitError {}

impl fmt::Display for PinPrefixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit(error) => error.fmt(f),
            Self::Pin(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PinPrefixError {}

impl fmt::Display for ResetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("requests are using the prefix cache; try again when idle"),
            Self::Lost(reason) => write!(f, "the engine has stopped: {reason}"),
        }
    }
}

impl std::error::Error for ResetError {}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::KvLayout {
                layout,
                num_pages,
                page_size,
            } => write!(
                f,
                "the executor has {} KV pages of {} tokens, the scheduler expects {num_pages} of \
                 {page_size}",
                layout.num_pages, layout.page_size
            ),
            Self::WarmUp(error) => write!(f, "warm-up failed: {error}"),
            Self::Thread(error) => write!(f, "cannot start the engine's thread: {error}"),
        }
    }
}

impl std::error::Error for EngineError {}
