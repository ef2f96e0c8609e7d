//! The policies, as values.
//!
//! A [`Policy`] gives each request one key, and says when keys are computed. Admission and preemption compare keys, and
//! are the same for all policies.

use crate::{ConfigError, SchedulerConfig};

/// The order in which waiting requests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// The earliest arrival goes first.
    Fcfs,
    /// The most urgent request goes first, and among equals the earliest arrival. If no room is free, a request
    /// preempts a less urgent running one.
    Priority,
    /// The request with the longest cached prefix among the first `lookahead` goes first, as in SGLang.
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

/// The state of a request, and its forecast, when its key is computed.
pub(crate) struct RequestFacts<'a> {
    /// The caller's priority; smaller is more urgent.
    pub priority: i32,
    /// The number of prompt tokens and drawn tokens.
    pub num_known_tokens: u32,
    /// The number of rows in the prefix tree with which a waiting request could start.
    pub num_cached_rows: u32,
    /// The number of output tokens still to come, by the median length of the outputs that became at least as long as
    /// the request's output so far.
    pub num_tokens_left: &'a dyn Fn() -> u32,
}

/// A scheduling policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// A smaller key is more urgent. At equal keys, the earliest arrival goes first.
    pub key: fn(&RequestFacts) -> i64,
    /// `None` if the key of a waiting request never changes: the queue is sorted by the keys at arrival. Otherwise the
    /// queue is in order of arrival, and the keys of its first `lookahead` requests are computed when some can start.
    pub lookahead: Option<u32>,
    /// Whether the keys of running requests are computed anew in each step. The requests are planned in the order of
    /// their keys, and the last of them is preempted first. If false, requests are ranked by their keys at arrival, and
    /// by arrival if the policy has no such keys.
    pub ranks_running: bool,
    /// Whether a request may start before requests with earlier tickets. Then the steps in which a request was passed
    /// over are counted. Packing has a count of its own.
    pub overtakes: bool,
    /// Whether a waiting request takes the place of running requests with larger keys. If true, preempted requests wait
    /// among the others. If false, they start before all new requests.
    pub preempts: bool,
}

/// First come, first served. Other policies are given by their differences from this one.
const FCFS: Policy = Policy {
    key: |_| 0,
    lookahead: None,
    ranks_running: false,
    overtakes: false,
    preempts: false,
};

impl SchedulingPolicy {
    pub(crate) fn policy(self) -> Policy {
        match self {
            Self::Fcfs => FCFS,
            Self::Priority => Policy {
                key: |facts| facts.priority.into(),
                overtakes: true,
                preempts: true,
                ..FCFS
            },
            // A request starts before its cached prefix is evicted.
            Self::LongestPrefix { lookahead } => Policy {
                key: |facts| -i64::from(facts.num_cached_rows),
                lookahead: Some(lookahead),
                overtakes: true,
                ..FCFS
            },
            // The mean wait is least if the request with the least work starts first (Smith 1956).
            Self::ShortestFirst { lookahead } => Policy {
                key: |facts| {
                    let num_tokens = facts.num_known_tokens + (facts.num_tokens_left)();
                    num_tokens.saturating_sub(facts.num_cached_rows).into()
                },
                lookahead: Some(lookahead),
                overtakes: true,
                ..FCFS
            },
        }
    }
}

impl SchedulerConfig {
    /// Whether all waiting requests start before a request that arrives now.
    pub(crate) fn starts_in_order(&self) -> bool {
        let is_packed = self.prefill_admission_policy != PrefillAdmissionPolicy::Fifo;
        !self.scheduling_policy.policy().overtakes && !is_packed
    }

    /// Refuses unusable parameters of policies.
    pub(super) fn validate_policies(&self) -> Result<(), ConfigError> {
        let policy = self.scheduling_policy.policy();
        let packed = match self.prefill_admission_policy {
            PrefillAdmissionPolicy::Fifo => None,
            PrefillAdmissionPolicy::Pack { lookahead, .. } => Some(lookahead),
        };
        if [policy.lookahead, packed].contains(&Some(0)) {
            return Err(ConfigError::new(
                "prefill_admission_lookahead",
                " must be at least 1",
            ));
        }
        if packed.is_some() && policy.overtakes {
            let error = ConfigError::new("prefill_admission_policy", " pack requires ");
            return Err(error.then("scheduling_policy", " fcfs"));
        }
        let is_by_prefix = matches!(
            self.scheduling_policy,
            SchedulingPolicy::LongestPrefix { .. }
        );
        if is_by_prefix && !self.enable_prefix_caching {
            return Err(ConfigError::new(
                "scheduling_policy",
                " lpm requires the prefix cache, which is disabled",
            ));
        }
        Ok(())
    }
}
