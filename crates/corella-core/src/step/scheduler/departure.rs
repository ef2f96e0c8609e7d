//! The end of a request's wait or run, and the release of its slot, pages and locks.

use crate::request_state::{Leader, Leaving, Phase, RequestIndex};
use crate::{FinishReason, RequestError, Sample, Scheduler};

impl Scheduler {
    /// Emits the terminal output. The request frees its slot and pages when no step names it.
    pub(super) fn finish(
        &mut self,
        index: RequestIndex,
        reason: FinishReason,
        sample: Option<Sample>,
    ) {
        self.forecast.note_ended(&self.requests[index], &reason);
        self.emit(index, sample, Some(reason));
        self.leave(index, Leaving::Finished);
    }

    /// Takes away a request's slot and pages. The request keeps its tokens and waits again. It ends with an error if it
    /// was preempted too often, or if its KV came from another node and cannot be kept.
    pub(super) fn preempt(&mut self, index: RequestIndex) {
        self.journal.counters().num_preemptions += 1;
        let num_preemptions = self.requests[index].note_preempted();
        if num_preemptions > self.config.max_preemptions {
            let error = RequestError::PreemptedTooOften { num_preemptions };
            self.finish(index, FinishReason::Error(error), None);
        } else if self.reserve_spill(index) || !self.requests[index].came_with_kv() {
            self.leave(index, Leaving::Preempted);
        } else {
            self.hand_back(index, "there is no room for it in host memory");
        }
    }

    /// Removes a request from the waiting queue or the running set.
    pub(super) fn leave(&mut self, index: RequestIndex, how: Leaving) {
        let state = &mut self.requests[index];
        if state.phase() == Phase::Waiting {
            self.waiting.take_out(index, &mut self.requests[index]);
        }
        if how != Leaving::Preempted {
            self.abandon_spill(index);
        }
        let state = &mut self.requests[index];
        match state.enter(Phase::Leaving(how)) {
            Phase::Waiting => {}
            phase @ (Phase::Receiving | Phase::Arrived) => self.leave_remote_kv(index, phase),
            Phase::Running => {
                self.running.remove(index, &self.requests);
                self.forecast.stop_counting(&mut self.requests[index]);
                let requests = &mut self.requests;
                self.waiting
                    .let_go_of_followers(Leader::Request(index), u32::MAX, requests);
            }
            Phase::Leaving(_) => self.running.note_left(),
        }
        self.running.note_leaving();
        if self.requests[index].num_inflight_steps() == 0 {
            self.release(index);
        }
    }

    /// Frees the request's slot, pages and locks after the last step that names them. Computed blocks stay in the
    /// prefix tree.
    pub(super) fn release(&mut self, index: RequestIndex) {
        if let Some(last_returned) = self.inflight.last_returned()
            && self.config.enable_prefix_caching
        {
            self.requests[index].publish_computed(&mut self.kv, last_returned);
        }
        self.requests[index].leave_snapshot(&mut self.kv);
        self.hold_exported(index);
        self.store_spill(index);
        self.running.note_left();
        let state = &mut self.requests[index];
        self.kv.unlock_all(state.take_pages());
        let snapshot = state.take_received_state();
        self.drop_snapshot(snapshot);
        self.requests[index].leave_path(&mut self.kv);
        let state = &mut self.requests[index];
        state.set_restored_block(None);
        state.set_branch(0);
        state.replace_passing(0);
        if let Some(slot) = state.take_slot() {
            self.running.give_back_slot(slot);
        }
        if state.phase() == Phase::Leaving(Leaving::Finished) {
            self.requests.remove(index);
            return;
        }
        state.enter(Phase::Waiting);
        state.forget_rows();
        self.waiting
            .add(index, &mut self.requests[index], &self.pace);
    }
}
