//! Detection of time that stands still: a passed deadline must be removed, or the driver is woken for ever.

use crate::check::verdict::{Verdict, ensure};

/// A limit above the number of events of any run at one time.
const MAX_EVENTS_AT_ONCE: u64 = 20_000;

#[derive(Default)]
pub struct Standstill {
    at_us: u64,
    num_events: u64,
}

impl Standstill {
    /// Counts an event.
    pub fn check(&mut self, now_us: u64) -> Verdict {
        if self.at_us != now_us {
            *self = Self {
                at_us: now_us,
                num_events: 0,
            };
        }
        self.num_events += 1;
        ensure(self.num_events <= MAX_EVENTS_AT_ONCE, || {
            format!("{} events at once", self.num_events)
        })
    }
}
