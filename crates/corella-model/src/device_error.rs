//! Why a device cannot be used, or cannot run a model.

use std::fmt;

/// A sentence for whoever runs the server: what failed, and what to change where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError(pub String);

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DeviceError {}
