//! The policies.
//!
//! Each policy's choice has a file in `step/scheduler/policy`. All other code that depends on the policy is a method
//! here, without a wildcard arm, so that a new policy does not compile before each method covers it.

use crate::{ConfigError, SchedulerConfig};

/// The order in which waiting requests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// The earliest arrival goes first.
    Fcfs,
    /// The most urgent request goes first, and among equals the earliest arrival. If no room is free, a request
    /// preempts a less urgent running one.
    Priority,
    /// The request with the longest cached prefix among the first `lookahead` goes first, as in
    /// SGLang.
    LongestPrefix { lookahead: u32 },
    /// The request with the least work left among the first `lookahead` goes first: rows that are not cached, and its
    /// expected output (shortest job first).
    ShortestFirst { lookahead: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAdmissionPolicy {
    /// Admission stops at the first waiting request that does not fit.
    Fifo,
    /// Admission starts the smallest of the first `lookahead` waiting requests, while they fit. Every
    /// `force_fifo_every`-th round in which any request waits is FIFO; with 0, no round is.
    Pack {
        lookahead: u32,
        force_fifo_every: u32,
    },
}

impl SchedulingPolicy {
    /// Whether preempted requests start before new ones. Otherwise both are sorted by rank alone.
    pub(crate) fn resumes_first(self) -> bool {
        match self {
            Self::Fcfs | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => true,
            Self::Priority => false,
        }
    }

    /// Whether requests may start before others with earlier tickets, so that the steps in which a request was passed
    /// over are counted. Packing counts for itself.
    pub(crate) fn overtakes(self) -> bool {
        match self {
            Self::Fcfs => false,
            Self::Priority | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => true,
        }
    }

    /// The part of a request's rank that comes from its caller's priority; smaller is more urgent.
    pub(crate) fn rank_of(self, priority: i32) -> i32 {
        match self {
            Self::Fcfs | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => 0,
            Self::Priority => priority,
        }
    }

    /// Whether running requests are preempted for more urgent waiting ones.
    pub(crate) fn preempts(self) -> bool {
        match self {
            Self::Fcfs | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => false,
            Self::Priority => true,
        }
    }
}

impl SchedulerConfig {
    /// Whether all waiting work is done before the work of a request that arrives now.
    pub(crate) fn starts_in_order(&self) -> bool {
        let is_packed = match self.prefill_admission_policy {
            PrefillAdmissionPolicy::Fifo => false,
            PrefillAdmissionPolicy::Pack { .. } => true,
        };
        !self.scheduling_policy.overtakes() && !is_packed
    }

    /// Refuses unusable parameters of policies.
    pub(super) fn validate_policies(&self) -> Result<(), ConfigError> {
        let (admission_lookahead, is_packed) = match self.prefill_admission_policy {
            PrefillAdmissionPolicy::Fifo => (1, false),
            PrefillAdmissionPolicy::Pack { lookahead, .. } => (lookahead, true),
        };
        let (lookahead, needs_cache, is_fcfs) = match self.scheduling_policy {
            SchedulingPolicy::Fcfs => (1, false, true),
            SchedulingPolicy::Priority => (1, false, false),
            SchedulingPolicy::LongestPrefix { lookahead } => (lookahead, true, false),
            SchedulingPolicy::ShortestFirst { lookahead } => (lookahead, false, false),
        };
        if lookahead == 0 || admission_lookahead == 0 {
            return Err(ConfigError(
                "prefill_admission_lookahead must be at least 1".into(),
            ));
        }
        if is_packed && !is_fcfs {
            return Err(ConfigError(
                "prefill_admission_policy pack requires scheduling_policy fcfs".into(),
            ));
        }
        if needs_cache && !self.enable_prefix_caching {
            return Err(ConfigError(
                "scheduling_policy lpm requires the prefix cache, which is disabled".into(),
            ));
        }
        Ok(())
    }
}
