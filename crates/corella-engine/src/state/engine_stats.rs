//! The engine's counters, and their metrics.

use std::time::Duration;

use corella_core::{Metric, MetricValue, SchedulerStats};

use crate::kv_disk::KvDiskStats;
use crate::state::step_tokens::StepTokens;

/// A snapshot of the engine's counters. They count from the engine's start and never shrink, except
/// for the present states in `scheduler` and `num_live_requests`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub scheduler: SchedulerStats,
    /// Requests that were submitted and have not ended: on the way to the engine's thread, waiting or running.
    pub num_live_requests: usize,
    /// Requests that ended with an end or stop token.
    pub num_finished_stop: u64,
    pub num_finished_length: u64,
    pub num_finished_abort: u64,
    pub num_finished_error: u64,
    /// Requests that the scheduler refused, for any reason.
    pub num_refused: u64,
    pub num_steps: u64,
    /// The tokens of all steps, as a histogram.
    pub step_tokens: StepTokens,
    pub num_failed_steps: u64,
    /// Steps that ran longer than `EngineConfig::step_timeout`.
    pub num_slow_steps: u64,
    /// Total time of all steps. A step's time begins when it is submitted or when the step before
    /// it has returned, whichever is later, and ends when it returns.
    pub step_time: Duration,
    /// `None` without a disk for blocks.
    pub kv_disk: Option<KvDiskStats>,
}

type Row = Metric<EngineStats>;

impl EngineStats {
    pub const METRICS: &[Metric<Self>] = &[
        Row::counter("steps", |stats| stats.num_steps).help("Steps that were computed"),
        Row::new("step_seconds", MetricValue::Time(|stats| stats.step_time))
            .help("Time spent in steps"),
        Row::counter("failed_steps", |stats| stats.num_failed_steps).help("Steps that failed"),
        Row::counter("slow_steps", |stats| stats.num_slow_steps)
            .help("Steps that took longer than 30 seconds"),
    ];
}
