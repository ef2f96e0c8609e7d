//! How a request stops waiting or running, and when it gives up its slot, pages and locks.

use crate::request_state::{Leaving, RequestIndex, Stage};
use crate::{FinishReason, RequestError, Sample, Scheduler, StepId};

impl Scheduler {
    /// Emits the terminal output. The request gives up what it holds as soon as no step names it.
    pub(crate) fn finish(
        &mut self,
        index: RequestIndex,
        reason: FinishReason,
        sample: Option<Sample>,
    ) {
        self.note_output_ended(index, &reason);
        self.emit(index, sample, Some(reason));
        self.leave(index, Leaving::Finished);
    }

    /// Records how long the output was. Only outputs that ended by themselves, or because the
    /// reader left, tell something about the lengths to expect.
    fn note_output_ended(&mut self, index: RequestIndex, reason: &FinishReason) {
        let state = &self.requests[index];
        let num_tokens = state.num_output_tokens();
        let is_natural = match reason {
            FinishReason::EndToken | FinishReason::StopToken | FinishReason::Aborted => true,
            FinishReason::Length | FinishReason::Error(_) => false,
        };
        if is_natural && num_tokens > 0 && !state.is_length_known {
            let namespace = &state.request.namespace;
            self.output_lengths.note_ended(namespace, num_tokens);
        }
    }

    /// Takes away a request's slot and pages. It keeps its tokens and waits again, or ends with an
    /// error if it was preempted too often, or came with KV that cannot be kept.
    pub(crate) fn preempt(&mut self, index: RequestIndex) {
        self.counters.num_preemptions += 1;
        let state = &mut self.requests[index];
        state.num_preemptions += 1;
        let num_preemptions = state.num_preemptions;
        if num_preemptions > self.config.max_preemptions {
            let error = RequestError::PreemptedTooOften { num_preemptions };
            self.finish(index, FinishReason::Error(error), None);
        } else if self.reserve_spill(index) || !self.requests[index].came_with_kv {
            self.leave(index, Leaving::Preempted);
        } else {
            self.hand_back(index, "there is no room for it in host memory");
        }
    }

    /// Takes a request out of the waiting queue or the running set.
    pub(crate) fn leave(&mut self, index: RequestIndex, how: Leaving) {
        let state = &mut self.requests[index];
        if state.stage == Stage::Waiting {
            self.stop_waiting(index);
        }
        if how != Leaving::Preempted {
            self.abandon_spill(index);
        }
        let state = &mut self.requests[index];
        match core::mem::replace(&mut state.stage, Stage::Leaving(how)) {
            Stage::Waiting => {}
            stage @ (Stage::Receiving | Stage::Arrived) => self.leave_receipts(index, stage),
            Stage::Running => {
                self.running.remove(index, &self.requests);
                self.stop_counting(index);
                self.let_go_of_followers(index, u32::MAX);
            }
            Stage::Leaving(_) => self.running.note_left(),
        }
        self.running.note_leaving();
        if self.requests[index].num_inflight_steps == 0 {
            self.release(index);
        }
    }

    /// Frees slot, pages and locks, now that no step in flight names them. What was computed stays
    /// in the prefix tree.
    pub(crate) fn release(&mut self, index: RequestIndex) {
        self.publish_computed(index);
        self.hold_exported(index);
        self.store_spill(index);
        self.running.note_left();
        let state = &mut self.requests[index];
        let donor = state.donor.take().map(|(pages, _)| pages);
        let pages = state.tables.take_pages();
        self.kv.unlock_all(donor.into_iter().flatten().chain(pages));
        self.leave_path(index);
        let state = &mut self.requests[index];
        if let Some(slot) = state.slot.take() {
            self.slots.give_back(slot);
        }
        if state.stage == Stage::Leaving(Leaving::Finished) {
            self.requests.remove(index);
            return;
        }
        state.stage = Stage::Waiting;
        state.num_computed_tokens = 0;
        state.num_scheduled_tokens = 0;
        state.num_inflight_samples = 0;
        state.prefill_end = 0;
        self.wait(index);
    }

    /// The newest step that has returned or failed.
    pub(crate) fn last_returned(&self) -> Option<StepId> {
        self.inflight.last_returned()
    }
}
