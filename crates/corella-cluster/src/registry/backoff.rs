//! The wait before the next try.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// A wait that doubles from `min` to `max`. Half of each wait is scaled by a random factor, so that
/// clients which lost the same server do not all reconnect at once.
#[derive(Debug)]
pub(super) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max,
            next: min,
        }
    }

    pub fn reset(&mut self) {
        self.next = self.min;
    }

    pub fn next(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.max);
        // Each `RandomState` has its own keys.
        let random = RandomState::new().hash_one(()) % 1024;
        wait / 2 + wait / 2 * random as u32 / 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_their_limit_and_start_anew() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(5));
        let check = |backoff: &mut Backoff| {
            for limit in [1, 2, 4, 5, 5] {
                let wait = backoff.next();
                assert!(
                    wait <= seconds(limit) && wait >= seconds(limit) / 2,
                    "{wait:?}"
                );
            }
        };
        check(&mut backoff);
        backoff.reset();
        check(&mut backoff);
    }
}
