//! When something was last received on an open stream, and when something was last sent on it.

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

    /// When the other end is given up.
    pub fn lost_us(&self, config: &SessionConfig) -> u64 {
        self.heard_us.saturating_add(config.lost_after_us)
    }

    /// When a heartbeat is due, unless something else is sent before.
    pub fn due_us(&self, config: &SessionConfig) -> u64 {
        self.sent_us.saturating_add(config.heartbeat_us)
    }
}
