//! Time that stands still: a deadline that passes must be over, or its driver is woken for ever.

use crate::checker::{Verdict, ensure};

/// More events at one time than any run has.
const MAX_EVENTS_AT_ONCE: u64 = 20_000;

#[derive(Default)]
pub struct Standstill {
    at_us: u64,
    num_events: u64,
}

impl Standstill {
    /// Something happens.
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
