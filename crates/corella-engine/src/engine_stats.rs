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
    /// All steps', each from its submission, or the end of the step before it, to its result.
    pub step_time: Duration,
}
