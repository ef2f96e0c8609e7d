//! Starts waiting requests in the order of the policy. Each policy's choice has a file.

mod first_come;
mod longest_prefix;
mod look_ahead;
mod packing;
mod priority;
mod shortest_first;

use crate::queue::waiting_queue::WaitingQueue;
use crate::request_state::RequestIndex;
use crate::step::scheduler::admission::Held;
use crate::step::step_plan::StepPlan;
use crate::{Scheduler, SchedulingPolicy};

impl Scheduler {
    /// Starts waiting requests in the order of the policy.
    pub(super) fn admit_waiting(&mut self, plan: &mut StepPlan) {
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

    /// Starts requests from `first` one after the other. Returns false as soon as one does not fit,
    /// and true when none is left.
    pub(super) fn admit_while(
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
