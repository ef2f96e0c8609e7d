//! The reason for which a device cannot be used, or cannot run a model.

/// A sentence for the operator: the failure, and the remedy where known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);
