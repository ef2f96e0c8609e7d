//! The facts of a run that a checker sees, and its verdict.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{Batch, MissedObjective, RequestId, RequestOutput, SchedulerStats, SlotId};

use crate::workload::Answer;

pub type Verdict = Result<(), String>;

/// A step that has just been planned.
pub struct Planned<'a> {
    pub batch: &'a Batch,
    /// The request that holds each slot.
    pub slots: &'a BTreeMap<SlotId, RequestId>,
    /// Slots whose requests have drawn no token before the step: their spans are prefill.
    pub prefilling: &'a BTreeSet<SlotId>,
    pub now_us: u64,
    pub stats: SchedulerStats,
}

/// A rule. It sees the scheduler's inputs and outputs, and reports violations.
pub trait Checker {
    fn rule(&self) -> &'static str;

    fn queued(&mut self, _answer: &Answer) {}

    /// Checks a refusal of a call that would be late.
    fn refused(&mut self, _answer: &Answer, _missed: &MissedObjective) -> Verdict {
        Ok(())
    }

    fn aborted(&mut self, _id: RequestId) {}

    fn planned(&mut self, _step: &Planned<'_>) -> Verdict {
        Ok(())
    }

    /// Notes that a step of `num_tokens` tokens has returned or failed, `elapsed_us` after it was planned.
    fn returned(&mut self, _num_tokens: u64, _elapsed_us: u64) {}

    fn step_failed(&mut self, _requests: &BTreeSet<RequestId>) {}

    fn told(&mut self, _output: &RequestOutput, _now_us: u64) -> Verdict {
        Ok(())
    }

    /// Checks the state after an event and all of its consequences.
    fn settled(&mut self, _stats: &SchedulerStats) -> Verdict {
        Ok(())
    }

    /// Checks the state at the end of the run.
    fn ended(&mut self, _stats: &SchedulerStats) -> Verdict {
        Ok(())
    }
}

pub fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}
