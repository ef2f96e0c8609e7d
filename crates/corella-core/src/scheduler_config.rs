//! Every limit of the scheduler, checked once.

use alloc::string::String;
use core::fmt;

/// Limits and policies. Counts are tokens unless they say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    pub num_pages: u32,
    pub page_size: u32,
    pub max_model_len: u32,
    /// Slots: requests that hold KV at once.
    pub max_num_seqs: u32,
    /// One step's budget, prefill and decode together.
    pub max_num_batched_tokens: u32,
    /// Prefill tokens of a step, all requests together.
    pub max_prefill_tokens: u32,
    /// One request's share of a step's prefill while others want some; 0 is no bound.
    pub long_prefill_token_threshold: u32,
    /// Requests that prefill in one step.
    pub max_prefill_seqs: u32,
    /// Requests that decode in one step, round robin over the running set.
    pub max_decode_seqs: u32,
    pub max_queued_requests: u32,
    pub enable_prefix_caching: bool,
    pub enable_chunked_prefill: bool,
    pub prefill_admission_policy: PrefillAdmissionPolicy,
    /// A waiting request overtaken this often becomes the head that nothing overtakes.
    pub max_passed_over: u32,
    /// Share of its remaining output that a request reserves on admission, in 1/65536.
    /// 65536 reserves all of it and never preempts.
    pub new_token_ratio: u32,
    /// Preempted more often than this, a request ends with an error.
    pub max_preemptions: u32,
    /// Steps planned before the first of them has returned.
    pub max_inflight_steps: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAdmissionPolicy {
    /// Stop at the first waiting request that does not fit.
    Fifo,
    /// Among the first `lookahead` waiting requests take the smallest that fit; every
    /// `force_fifo_every`-th round in which anyone waits is FIFO (0: never).
    Pack {
        lookahead: u32,
        force_fifo_every: u32,
    },
}

impl SchedulerConfig {
    pub const RATIO_ONE: u32 = 1 << 16;
}

/// A configuration that cannot work, said in terms of the options to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for ConfigError {}
