//! How long a model stays loaded after its last use.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    Forever,
    /// With a duration of 0, the model is unloaded when its last use ends.
    For(Duration),
}

impl KeepAlive {
    /// The model is unloaded when its last use ends.
    pub const NONE: Self = Self::For(Duration::ZERO);
}
