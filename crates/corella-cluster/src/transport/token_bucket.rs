//! The limit of the bytes per second that a node sends.

use std::time::{Duration, Instant};

/// Bytes that were left unsent for up to this long may be sent at once.
const BURST: Duration = Duration::from_millis(20);

/// A bucket that may go below zero: chunks first take their bytes and then wait, in their order.
pub struct TokenBucket {
    bytes_per_s: f64,
    /// The number of bytes that may be sent now. Negative while chunks wait.
    num_bytes: f64,
    filled_at: Instant,
}

impl TokenBucket {
    pub fn new(bytes_per_s: u64, now: Instant) -> Self {
        Self {
            bytes_per_s: bytes_per_s as f64,
            num_bytes: 0.0,
            filled_at: now,
        }
    }

    /// Takes bytes that may be sent after the returned time.
    pub fn take(&mut self, num_bytes: usize, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.filled_at).as_secs_f64();
        let most = self.bytes_per_s * BURST.as_secs_f64();
        self.filled_at = self.filled_at.max(now);
        self.num_bytes = (self.num_bytes + since * self.bytes_per_s).min(most);
        self.num_bytes -= num_bytes as f64;
        Duration::from_secs_f64((-self.num_bytes / self.bytes_per_s).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_paid_for_in_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let mut bucket = TokenBucket::new(1_000_000, start);
        assert_eq!(ms(bucket.take(50_000, start)), 50.0);
        assert_eq!(ms(bucket.take(50_000, start)), 100.0);
        assert_eq!(ms(bucket.take(50_000, at(100))), 50.0);
        // After a long silence, 20 ms' worth may go at once, and no more.
        assert_eq!(ms(bucket.take(20_000, at(60_000))), 0.0);
        assert_eq!(ms(bucket.take(10_000, at(60_000))), 10.0);
    }
}
