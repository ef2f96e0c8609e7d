//! Why a node cannot have a role, for the operator.

use std::fmt;
use std::io;

#[derive(Debug)]
pub enum NodeError {
    /// Options that contradict each other or the machine.
    Config(String),
    Io(String, io::Error),
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(reason) => f.write_str(reason),
            Self::Io(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for NodeError {}

/// Returns the error for a value of `--transport` that does not work here.
pub fn transport_error(value: &str, error: impl fmt::Display) -> NodeError {
    NodeError::Config(format!("--transport {value}: {error}"))
}
