//! Errors about checkpoints, one line for the operator who named the checkpoint.

/// The reason for which a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {problem}")]
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
