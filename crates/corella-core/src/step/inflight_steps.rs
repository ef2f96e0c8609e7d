//! Steps that were planned and have not returned.

use alloc::collections::VecDeque;

use crate::StepId;
use crate::step::step_plan::InflightStep;

#[derive(Debug, Default)]
pub(crate) struct InflightSteps {
    /// Oldest first. They return in this order.
    steps: VecDeque<InflightStep>,
    next_step: StepId,
}

impl InflightSteps {
    /// The number of the next planned step.
    pub fn next_step(&self) -> StepId {
        self.next_step
    }

    /// The newest step that has returned or failed.
    pub fn last_returned(&self) -> Option<StepId> {
        let first_inflight = self.steps.front().map_or(self.next_step, |step| step.step);
        first_inflight.0.checked_sub(1).map(StepId)
    }

    /// Adds the step that was planned as [`next_step`](Self::next_step).
    pub fn push(&mut self, step: InflightStep) {
        debug_assert_eq!(step.step, self.next_step, "steps are planned in order");
        self.next_step.0 += 1;
        self.steps.push_back(step);
    }

    pub fn take_oldest(&mut self) -> Option<InflightStep> {
        self.steps.pop_front()
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &InflightStep> {
        self.steps.iter()
    }
}
