//! Preempted requests keep their KV in host memory, and are restored from it.

use crate::queue::waiting_for_remote_kv::NO_DEADLINE;
use crate::request_state::{Leaving, Phase, RequestIndex};
use crate::step::scheduler::admission::{Candidate, Held};
use crate::step::step_plan::StepPlan;
use crate::{FinishReason, RequestError, RequestId, Scheduler};

impl Scheduler {
    /// Reports that a [`SpillTask::Store`](crate::SpillTask::Store) has ended. If `is_done`, the task's pages are in
    /// host memory. Returns false if no such task was under way.
    pub fn handle_stored(&mut self, id: RequestId, is_done: bool) -> bool {
        let Some(ended) = self.spills.end_store(id, is_done) else {
            return false;
        };
        self.kv.unlock_all(ended.pages);
        self.journal.counters().num_spills += u64::from(ended.is_kept);
        if ended.is_lost {
            self.go_on_without_kv(
                self.requests.find(id).expect("the request is live"),
                "it could not be copied to host memory",
            );
        }
        true
    }

    /// Reports that a [`SpillTask::Restore`](crate::SpillTask::Restore) has ended. If `is_done`, the task's pages are
    /// filled. If not, some pages are not filled, but all writes to them have ended. Returns false if no such task was
    /// under way.
    pub fn handle_restored(&mut self, id: RequestId, is_done: bool) -> bool {
        let Some((pages, is_live)) = self.spills.end_restore(id) else {
            return false;
        };
        self.kv.unlock_all(pages);
        if !is_live {
            return true;
        }
        let index = self.requests.find(id).expect("the request is live");
        if is_done {
            self.journal.counters().num_restores += 1;
            let num_rows = self.requests[index].num_rows();
            self.remote_kv.arrive(index, num_rows, &mut self.requests);
        } else {
            self.stop_receiving(index);
            self.go_on_without_kv(index, "it could not be copied back from host memory");
        }
        true
    }

    /// Reserves host memory for a request that is about to lose its pages. Returns false if its KV cannot be kept.
    pub(super) fn reserve_spill(&mut self, index: RequestIndex) -> bool {
        let state = &mut self.requests[index];
        // A partly computed prompt is quickly computed again, and exported pages are held in any case.
        if state.is_prefilling() || state.request().exports_kv {
            return false;
        }
        let num_pages = state.tables().num_pages();
        let max_pages = self.config.max_spilled_pages;
        let has_room = self.spills.try_reserve(num_pages, max_pages);
        if has_room {
            state.set_spill_pages(num_pages as u32);
        }
        has_room
    }

    /// Begins to store the rows of a request that gives up its pages, if host memory is reserved for it and it will
    /// continue. Pages without rows stay in the request's table.
    pub(super) fn store_spill(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let num_reserved_pages = state.num_spill_pages();
        state.set_spill_pages(0);
        self.spills.give_back_reserved(num_reserved_pages);
        if num_reserved_pages == 0 || state.phase() != Phase::Leaving(Leaving::Preempted) {
            return;
        }
        debug_assert_eq!(state.num_computed_tokens(), state.num_rows());
        let end = state.num_computed_tokens().div_ceil(self.config.page_size) as usize;
        let source = state.tables_mut().split_before(end);
        let id = state.id();
        self.note_admitted(index);
        self.spills.store(id, source);
    }

    pub(super) fn abandon_spill(&mut self, index: RequestIndex) {
        self.spills.abandon(self.requests[index].id());
    }

    /// Handles a waiting request's loss of KV: it is computed here or, if another node computed its KV, ends.
    fn go_on_without_kv(&mut self, index: RequestIndex, reason: &str) {
        if self.requests[index].came_with_kv() {
            self.hand_back(index, reason);
        }
    }

    /// Ends a request whose KV another node computed, so that the other node continues it.
    pub(super) fn hand_back(&mut self, index: RequestIndex, reason: &str) {
        self.journal.counters().num_handed_back += 1;
        let error = RequestError::KvNotKept(reason.into());
        self.finish(index, FinishReason::Error(error), None);
    }

    /// Gives a stored request pages for all its rows, if there is room for all of them.
    pub(super) fn try_restore(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Result<(), Held> {
        if !self.spills.is_stored(self.requests[index].id()) {
            return Err(Held::NoRoom);
        }
        let candidate = self.candidate(index, plan)?;
        if !self.has_pages_for(&candidate) {
            return Err(Held::NoRoom);
        }
        if self.would_delay_aged(&candidate, plan) {
            return Err(Held::ByAged);
        }
        self.restore(&candidate, plan);
        Ok(())
    }

    fn restore(&mut self, candidate: &Candidate, plan: &mut StepPlan) {
        let index = candidate.index;
        self.take_pages(candidate, plan);
        let state = &mut self.requests[index];
        state.enter(Phase::Receiving);
        state.prefill_to(state.num_rows());
        let num_found = candidate.found.path.len();
        self.spills.restore(state.id(), state.tables(), num_found);
        self.begin_receiving(index, NO_DEADLINE);
    }
}
