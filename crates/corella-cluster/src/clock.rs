//! Microseconds since a node began: the time for its state machines.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn now_us(&self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }

    pub fn instant(&self, at_us: u64) -> Instant {
        self.0 + Duration::from_micros(at_us)
    }

    /// Returns the time left until `at_us`, or zero once it has passed.
    pub fn until(&self, at_us: u64) -> Duration {
        Duration::from_micros(at_us.saturating_sub(self.now_us()))
    }
}
