//! What the engine counts, for `/metrics`.

use std::time::Duration;

use corella_core::SchedulerStats;

/// A snapshot. Counters grow from the engine's start and never shrink.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub scheduler: SchedulerStats,
    /// Submitted and not yet ended: on the way to the loop, waiting or running.
    pub num_live_requests: usize,
    /// Ended with an end or stop token.
    pub num_finished_stop: u64,
    pub num_finished_length: u64,
    pub num_finished_abort: u64,
    pub num_finished_error: u64,
    /// Turned away by the core, for whatever reason.
    pub num_refused: u64,
    pub num_steps: u64,
    pub num_failed_steps: u64,
    /// Steps that ran longer than `EngineConfig::step_timeout`.
    pub num_slow_steps: u64,
    /// Of requests that ended, except those refused.
    pub num_prompt_tokens: u64,
    pub num_output_tokens: u64,
    /// From a step's submission, or the end of the step before it, to its result.
    pub step_seconds: Histogram,
    /// From arrival to first scheduling, of requests that ended.
    pub queue_seconds: Histogram,
}

/// Counts by upper bound; the last count is of what exceeds every bound.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    pub counts: [u64; Self::BOUNDS.len() + 1],
    pub sum_seconds: f64,
}

impl Histogram {
    /// Upper bounds in seconds, inclusive.
    pub const BOUNDS: [f64; 14] = [
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
    ];

    pub(crate) fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = Self::BOUNDS.partition_point(|&bound| bound < seconds);
        self.counts[bucket] += 1;
        self.sum_seconds += seconds;
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}
