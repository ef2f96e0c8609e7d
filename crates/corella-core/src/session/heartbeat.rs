//! The times of the last received and the last sent message of an open stream.

use crate::session::SessionConfig;

#[derive(Clone, Copy, Debug)]
pub(super) struct Heartbeat {
    pub heard_us: u64,
    pub sent_us: u64,
}

impl Heartbeat {
    pub fn new(now_us: u64) -> Self {
        Self {
            heard_us: now_us,
            sent_us: now_us,
        }
    }

    /// Returns the time at which the peer counts as lost.
    pub fn lost_us(&self, config: &SessionConfig) -> u64 {
        self.heard_us.saturating_add(config.lost_after_us)
    }

    /// Returns the time of the next heartbeat, unless another message is sent before.
    pub fn due_us(&self, config: &SessionConfig) -> u64 {
        self.sent_us.saturating_add(config.heartbeat_us)
    }
}
