//! Log lines that peers and clients cause, at most one a minute from each place.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(60);

/// Lets one line a minute through, and counts the lines left out.
#[derive(Debug, Default)]
pub struct RareLine(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    told_at: Option<Instant>,
    num_left_out: u64,
}

impl RareLine {
    pub const fn new() -> Self {
        Self(Mutex::new(State {
            told_at: None,
            num_left_out: 0,
        }))
    }

    /// If a line may be written now, the number of lines left out since the previous one.
    pub fn poll(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |at: Instant| now.saturating_duration_since(at) < INTERVAL;
        if state.told_at.is_some_and(is_recent) {
            state.num_left_out += 1;
            return None;
        }
        state.told_at = Some(now);
        Some(std::mem::take(&mut state.num_left_out))
    }
}

/// `rare_line!(warn, "…")` is `tracing::warn!("…")` at most once a minute. The field `num_left_out` counts the lines of
/// this place that were left out before.
#[macro_export]
macro_rules! rare_line {
    ($level:ident, $($line:tt)+) => {{
        static LINE: $crate::RareLine = $crate::RareLine::new();
        if let Some(num_left_out) = LINE.poll(::std::time::Instant::now()) {
            let num_left_out = (num_left_out > 0).then_some(num_left_out);
            ::tracing::$level!(num_left_out, $($line)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_one_line_and_the_next_counts_the_rest() {
        let line = RareLine::new();
        let start = Instant::now();
        assert_eq!(line.poll(start), Some(0));
        for ms in 0..1000 {
            assert_eq!(line.poll(start + Duration::from_millis(ms)), None);
        }
        assert_eq!(line.poll(start + INTERVAL), Some(1000));
        assert_eq!(line.poll(start + INTERVAL), None);
        assert_eq!(line.poll(start + 3 * INTERVAL), Some(1));
    }
}
