//! Latencies of tokens since the last reading, for watchers of the engine.
//!
//! The histograms of `/metrics` count from the start and have few buckets. The histograms here are emptied at each
//! reading, and have a bucket for each eighth of a power of two, so that a quantile is off by at most a sixteenth.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Latencies of all requests, recorded only while watched.
#[derive(Default)]
pub struct RecentLatency {
    is_watched: AtomicBool,
    pub time_to_first_token: LatencyHistogram,
    pub inter_token: LatencyHistogram,
}

/// Buckets of microseconds. Recording takes two additions of atomics.
pub struct LatencyHistogram {
    buckets: [AtomicU32; NUM_BUCKETS],
    total_us: AtomicU64,
}

/// The content of a histogram before it was emptied, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencySummary {
    count: u64,
    mean_ms: f64,
    p50_ms: f64,
    p95_ms: f64,
    max_ms: f64,
}

/// The number of bits after the leading bit that select a bucket.
const PRECISION_BITS: u32 = 3;

/// The buckets reach up to 2^36 microseconds, which are 19 hours.
const NUM_BUCKETS: usize = (36 - PRECISION_BITS as usize + 1) << PRECISION_BITS;

impl RecentLatency {
    /// Returns `None` without a watcher.
    pub fn watched(&self) -> Option<&Self> {
        self.is_watched.load(Ordering::Relaxed).then_some(self)
    }

    /// Forgets earlier latencies, and starts or stops recording.
    pub fn set_watched(&self, is_watched: bool) {
        self.time_to_first_token.take();
        self.inter_token.take();
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU32::new(0) }; NUM_BUCKETS],
            total_us: AtomicU64::new(0),
        }
    }
}

impl LatencyHistogram {
    pub fn observe(&self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(us)].fetch_add(1, Ordering::Relaxed);
        self.total_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Empties the histogram. Returns `None` if it was empty.
    pub fn take(&self) -> Option<LatencySummary> {
        let total_us = self.total_us.swap(0, Ordering::Relaxed);
        let counts: Vec<u64> = self
            .buckets
            .iter()
            .map(|bucket| bucket.swap(0, Ordering::Relaxed).into())
            .collect();
        let count: u64 = counts.iter().sum();
        if count == 0 {
            return None;
        }
        let quantile_ms = |percent: u64| {
            let rank = (count * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let index = counts.iter().position(|in_bucket| {
                seen += in_bucket;
                seen >= rank
            });
            index.map_or(0.0, |index| middle_us(index) / 1000.0)
        };
        Some(LatencySummary {
            count,
            mean_ms: total_us as f64 / count as f64 / 1000.0,
            p50_ms: quantile_ms(50),
            p95_ms: quantile_ms(95),
            max_ms: quantile_ms(100),
        })
    }
}

/// Returns the index of a latency's bucket: the power of two, and the bits after the leading bit.
fn bucket(us: u64) -> usize {
    let Some(shift) = us
        .checked_ilog2()
        .and_then(|log| log.checked_sub(PRECISION_BITS))
    else {
        return us as usize;
    };
    // `us >> shift` begins with the leading bit, so it is at least 8. Values below 8 have the first 8 buckets.
    let index = ((shift as usize) << PRECISION_BITS) + (us >> shift) as usize;
    index.min(NUM_BUCKETS - 1)
}

/// The middle of a bucket, in microseconds.
fn middle_us(index: usize) -> f64 {
    const NUM_EQUAL: usize = 1 << PRECISION_BITS;
    if index < NUM_EQUAL {
        return index as f64;
    }
    let shift = index / NUM_EQUAL - 1;
    let low = (NUM_EQUAL + index % NUM_EQUAL) << shift;
    low as f64 + ((1u64 << shift) - 1) as f64 / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_close() {
        let histogram = LatencyHistogram::default();
        assert_eq!(histogram.take(), None);
        // 1 ms, 2 ms, … 1 s.
        for ms in 1..=1000 {
            histogram.observe(Duration::from_millis(ms));
        }
        let summary = histogram.take().expect("it is not empty");
        assert_eq!(summary.count, 1000);
        assert!((summary.mean_ms - 500.5).abs() < 1e-9, "{summary:?}");
        for (value, expected) in [
            (summary.p50_ms, 500.0),
            (summary.p95_ms, 950.0),
            (summary.max_ms, 1000.0),
        ] {
            assert!((value / expected - 1.0).abs() <= 1.0 / 16.0, "{summary:?}");
        }
        assert_eq!(histogram.take(), None);
    }

    /// Every latency is in a bucket whose middle is at most a sixteenth away.
    #[test]
    fn buckets_hold_what_they_say() {
        let mut us = 0u64;
        while us < 1 << 36 {
            let middle = middle_us(bucket(us));
            assert!(
                (middle - us as f64).abs() <= us as f64 / 16.0,
                "{us}: {middle}"
            );
            us += 1 + us / 50;
        }
        assert_eq!(bucket(u64::MAX), NUM_BUCKETS - 1);
        let latency = RecentLatency::default();
        assert!(latency.watched().is_none());
        latency.set_watched(true);
        assert!(latency.watched().is_some());
    }
}
