//! First come, first served: requests start in order of arrival, or, with packing, the first few that fit do.

use crate::queue::waiting_queue::WaitingQueue;
use crate::step::step_plan::StepPlan;
use crate::{PrefillAdmissionPolicy, Scheduler};

impl Scheduler {
    pub(super) fn admit_first_come(&mut self, plan: &mut StepPlan) {
        match self.config.prefill_admission_policy {
            PrefillAdmissionPolicy::Pack {
                lookahead,
                force_fifo_every,
            } if !self.is_fifo_round(force_fifo_every) => self.admit_packed(lookahead, plan),
            PrefillAdmissionPolicy::Pack { .. } | PrefillAdmissionPolicy::Fifo => {
                self.admit_while(WaitingQueue::first_new, plan);
            }
        }
    }
}
