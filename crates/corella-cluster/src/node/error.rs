//! Why a node cannot have a role, for the operator.

use std::fmt;
use std::io;

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Options that contradict each other or the machine.
    #[error("{0}")]
    Config(String),
    #[error("{0}: {1}")]
    Io(String, io::Error),
}

/// Returns the error for a value of `--transport` that does not work here.
pub fn transport_error(value: &str, error: impl fmt::Display) -> NodeError {
    NodeError::Config(format!("--transport {value}: {error}"))
}
