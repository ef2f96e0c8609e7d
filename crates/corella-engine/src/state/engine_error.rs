//! The errors of an engine that does not start, or refuses a command.

use corella_core::{AdmissionError, ConfigError, PinError};
use corella_model::{ExecutorError, KvLayout};

/// The reason for refusing a submission. The engine keeps no part of the submission.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the engine is shutting down and takes no new requests")]
    Draining,
    #[error("the engine has stopped: {0}")]
    Lost(String),
    /// The request could never run, or has no room in the queue now.
    #[error("{0}")]
    Refused(AdmissionError),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResetError {
    /// Requests still hold pages of the cache.
    #[error("requests are using the prefix cache; try again when idle")]
    Busy,
    #[error("the engine has stopped: {0}")]
    Lost(String),
}

/// The reason for which a prefix was not pinned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinPrefixError {
    /// The prefix could not be computed.
    #[error("{0}")]
    Submit(SubmitError),
    #[error("{0}")]
    Pin(PinError),
}

/// The reason for which an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("{0}")]
    Config(ConfigError),
    /// The executor's KV pool differs from the scheduler's configuration.
    #[error(
        "the executor has {} KV pages of {} tokens, the scheduler expects {num_pages} of {page_size}",
        .layout.num_pages, .layout.page_size
    )]
    KvLayout {
        layout: KvLayout,
        num_pages: u32,
        page_size: u32,
    },
    #[error("warm-up failed: {0}")]
    WarmUp(ExecutorError),
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
}
