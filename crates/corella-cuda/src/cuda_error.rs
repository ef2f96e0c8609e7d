//! Why a device cannot be used, or no longer.

use std::fmt;

/// A sentence for whoever runs the server: what failed, and what to change where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError(pub String);

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CudaError {}
