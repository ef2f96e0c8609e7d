//! The error that tells an operator which model or configuration the executor cannot run.

use std::fmt;

/// A model or a configuration that the executor cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuError(pub String);

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CpuError {}
