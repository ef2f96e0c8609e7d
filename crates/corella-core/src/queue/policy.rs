//! Policies: the order in which waiting requests start.
//!
//! Each policy has a file. Everything else that depends on the policy is a method here, without a wildcard arm, so that a
//! new policy does not compile before each question has an answer.

mod first_come;
mod longest_prefix;
mod look_ahead;
mod packing;
mod priority;
mod shortest_first;

use crate::queue::admission::Held;
use crate::queue::waiting_queue::WaitingQueue;
use crate::request_state::RequestIndex;
use crate::step::step_plan::StepPlan;
use crate::{ConfigError, Scheduler, SchedulerConfig};

/// The order in which waiting requests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// The request that arrived first goes first.
    Fcfs,
    /// The most urgent request goes first, and among equals the one that arrived first. If nothing
    /// else makes room, a request takes the place of a running one that is less urgent.
    Priority,
    /// The request with the longest cached prefix among the first `lookahead` goes first, as in
    /// SGLang.
    LongestPrefix { lookahead: u32 },
    /// The request with the least work left among the first `lookahead` goes first: rows that are not cached, and
    /// the output that is expected of it (shortest job first).
    ShortestFirst { lookahead: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAdmissionPolicy {
    /// Admission stops at the first waiting request that does not fit.
    Fifo,
    /// Admission starts the smallest of the first `lookahead` waiting requests, as many as fit. Every
    /// `force_fifo_every`-th round in which any request waits is FIFO; 0 means none is.
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

    /// Whether requests may start before others with earlier tickets, so that the steps are counted in which a
    /// request was passed over. Packing counts for itself.
    pub(crate) fn overtakes(self) -> bool {
        match self {
            Self::Fcfs => false,
            Self::Priority | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => true,
        }
    }

    /// The part of a request's rank that its caller's priority decides; smaller is more urgent.
    pub(crate) fn rank_of(self, priority: i32) -> i32 {
        match self {
            Self::Fcfs | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => 0,
            Self::Priority => priority,
        }
    }

    /// Whether running requests are preempted for waiting ones that are more urgent.
    pub(crate) fn preempts(self) -> bool {
        match self {
            Self::Fcfs | Self::LongestPrefix { .. } | Self::ShortestFirst { .. } => false,
            Self::Priority => true,
        }
    }
}

impl SchedulerConfig {
    /// Whether all work that waits is done before that of a request that arrives now.
    pub(crate) fn starts_in_order(&self) -> bool {
        let is_packed = match self.prefill_admission_policy {
            PrefillAdmissionPolicy::Fifo => false,
            PrefillAdmissionPolicy::Pack { .. } => true,
        };
        !self.scheduling_policy.overtakes() && !is_packed
    }

    /// Refuses parameters of policies that cannot work.
    pub(crate) fn validate_policies(&self) -> Result<(), ConfigError> {
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

impl Scheduler {
    /// Starts waiting requests in the order of the policy.
    pub(crate) fn admit_waiting(&mut self, plan: &mut StepPlan) {
        if self.waiting.len() == 0 || plan.is_short_of_pages {
            return;
        }
        self.waiting.begin_round();
        if self.waiting.has_none_to_start() || !self.has_room_to_start(plan) {
            return;
        }
        self.keep_pages_of_running();
        let policy = self.config.scheduling_policy;
        if policy.resumes_first() && !self.admit_while(WaitingQueue::first_preempted, plan) {
            return self.note_passed_over(plan);
        }
        match policy {
            SchedulingPolicy::Fcfs => self.admit_first_come(plan),
            SchedulingPolicy::Priority => self.admit_by_priority(plan),
            SchedulingPolicy::LongestPrefix { lookahead } => {
                self.admit_longest_prefix(lookahead, plan);
            }
            SchedulingPolicy::ShortestFirst { lookahead } => {
                self.admit_shortest_first(lookahead, plan);
            }
        }
        self.note_passed_over(plan);
    }

    /// Starts the request that `first` returns, again and again. Returns false as soon as one does
    /// not fit, and true when there is none left.
    pub(crate) fn admit_while(
        &mut self,
        first: impl Fn(&WaitingQueue) -> Option<RequestIndex>,
        plan: &mut StepPlan,
    ) -> bool {
        while let Some(index) = first(&self.waiting) {
            if matches!(
                self.try_start(index, plan),
                Err(Held::NoRoom | Held::ByPatient)
            ) {
                return false;
            }
        }
        true
    }
}
