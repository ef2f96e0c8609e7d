//! Errors about checkpoints, one line for the operator who named the checkpoint.

use std::fmt;

/// The reason for which a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointError {
    /// The file (or folder) to look at.
    pub file: String,
    /// The defect: the field or tensor, its value, and the expected one.
    pub problem: String,
}

impl CheckpointError {
    pub(crate) fn new(file: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.problem)
    }
}

impl std::error::Error for CheckpointError {}
