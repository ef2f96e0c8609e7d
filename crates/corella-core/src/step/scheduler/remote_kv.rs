//! Requests whose prompt another node computes: their pages are taken before their KV arrives.
//!
//! ```text
//! reserve ──▶ Receiving ──handle_kv_arrived──▶ Arrived ──a slot is free──▶ Running
//!                 │ handle_kv_lost
//!                 └──▶ Waiting, to be computed here, or ended
//! ```
//!
//! A node that computes a prompt usually draws the first token as well. Otherwise the driver calls
//! [`handle_rows_arrived`](Scheduler::handle_rows_arrived) instead of
//! [`handle_kv_arrived`](Scheduler::handle_kv_arrived), and the last row is computed again for its logits.
//!
//! A reservation takes all pages of the prompt at once, so that two requests with half of their pages each never wait
//! for each other. The page forecast counts a reservation like a running request. Received pages are in no batch and
//! not in the prefix tree before all of them have arrived.

use alloc::vec::Vec;

use crate::cache::kv_cache::FoundPrefix;
use crate::request_state::{Phase, RequestIndex};
use crate::step::step_plan::StepPlan;
use crate::{
    AdmissionError, FetchedTokens, FinishReason, PageTable, Request, RequestError, RequestId,
    Scheduler, SnapshotId, TokenId,
};

/// The pages of a request whose KV another node will fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The page table of each KV group, up to the request's last token. Pages that the request will not read are left
    /// out.
    pub tables: Vec<PageTable>,
    /// For models with recurrent layers, the snapshot for the state after all rows.
    pub state: Option<SnapshotId>,
    /// The first rows, in whole pages, are already present and must not be written.
    pub num_cached_rows: u32,
    /// The index of this reservation among all granted ones, counted from 1. When
    /// [`SchedulerStats::num_reservations`](crate::SchedulerStats::num_reservations) is at least this number, the page
    /// counts in the same stats include the reservation's pages.
    pub granted_as: u64,
}

/// The fate of a request whose KV does not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostKv {
    /// The request waits, and is computed here.
    Recompute,
    /// The request ends with this reason.
    End(alloc::boxed::Box<str>),
}

impl Scheduler {
    /// Reserves pages, until `deadline_us`, for a request whose KV another node computes. The pages cover its prompt
    /// and any tokens already drawn for it, and the head-room forecast also allows for the pages that its output is
    /// expected to need. If the request is aborted, or the deadline passes before
    /// [`handle_kv_arrived`](Self::handle_kv_arrived) is called, the request ends. Its pages stay taken until
    /// [`handle_kv_lost`](Self::handle_kv_lost) reports that all writes to them have ended.
    ///
    /// [`AdmissionError::NoRoom`] means that another node may have room. [`AdmissionError::NoDecodeNode`] means that
    /// this node cannot serve the request, because the request asks for log-probabilities or a hidden state of the
    /// prompt, which only the node that computes the prompt has.
    pub fn reserve(
        &mut self,
        request: Request,
        deadline_us: u64,
    ) -> Result<Reservation, AdmissionError> {
        if request.sampling.wants_prompt_outputs() {
            return Err(AdmissionError::NoDecodeNode);
        }
        let max_tokens = self.config.check_request(&request)?;
        self.check_reserved_pace(&request)?;
        let state = self.new_state(request, max_tokens, 0)?;
        let index = self.requests.insert(state);
        let num_rows = self.requests[index].num_known_tokens();
        // A recurrent state comes with the last row.
        let is_recurrent = self.kv.is_recurrent();
        let found = self.ready_prefix(index, num_rows - u32::from(is_recurrent));
        let num_cached_rows = found.num_rows(self.config.page_size);
        let state = &mut self.requests[index];
        self.forecast.expect_output(state);
        state.limit_rows_at_once(self.config.num_rows_at_once(num_rows));
        state.enter(Phase::Receiving);
        // The last row may be computed again, so it does not count as given.
        let candidate = self.count_candidate(index, found, num_rows - 1);
        self.keep_pages_of_running();
        let num_new_pages = candidate.num_new_pages;
        let peak = self.forecast.pages_mut().peak_with(&candidate.demand);
        let num_needed_pages = num_new_pages + peak;
        let num_available_pages = self.kv.num_available();
        let num_free_slots = self.running.num_free_slots();
        let limit = self.waiting.limit(&self.config, num_free_slots);
        let is_full = self.remote_kv.len() >= limit as usize;
        let has_room = num_needed_pages.max(num_new_pages) <= num_available_pages && !is_full;
        let last_returned = self.inflight.last_returned();
        let snapshot = match has_room {
            true => self.kv.try_reserve_snapshot(last_returned),
            false => None,
        };
        if !has_room || is_recurrent && snapshot.is_none() {
            self.requests.remove(index);
            return Err(AdmissionError::NoRoom {
                num_needed_pages,
                num_available_pages,
            });
        }
        self.hold_first_pages(&candidate);
        let state = &mut self.requests[index];
        state.prefill_to(num_rows);
        state.receive_state(snapshot);
        let tables = state.tables().to_vec();
        self.begin_receiving(index, deadline_us);
        let num_reservations = &mut self.journal.counters().num_reservations;
        *num_reservations += 1;
        Ok(Reservation {
            tables,
            state: snapshot,
            num_cached_rows,
            granted_as: *num_reservations,
        })
    }

    pub(super) fn begin_receiving(&mut self, index: RequestIndex, deadline_us: u64) {
        let state = &mut self.requests[index];
        self.remote_kv.begin(index, state, deadline_us);
        self.forecast.count(state);
    }

    /// The prefix of a request's first `num_rows` tokens that is cached in whole pages and computed by returned steps.
    pub(super) fn ready_prefix(&self, index: RequestIndex, num_rows: u32) -> FoundPrefix {
        let mut found = FoundPrefix::nothing(self.config.kv_groups.len());
        if !self.config.enable_prefix_caching {
            return found;
        }
        let state = &self.requests[index];
        let namespace = &state.request().namespace;
        let tokens = &state.tokens()[..num_rows as usize];
        let last_returned = self.inflight.last_returned();
        found.path = self.kv.settled_path(namespace, tokens, last_returned);
        found.tables = self.kv.tables_of(&found.path);
        found
    }

    /// Reports that all rows of a reserved request are in its pages and that `token` was drawn after them. The request
    /// now waits for a slot. Returns false if the request has already ended, for example at its deadline.
    /// [`handle_kv_lost`](Self::handle_kv_lost) must then be called to release its pages.
    pub fn handle_kv_arrived(&mut self, id: RequestId, token: TokenId) -> bool {
        let Some(index) = self.receiving(id) else {
            return false;
        };
        let state = &mut self.requests[index];
        let num_rows = state.num_known_tokens();
        state.set_received_rows(num_rows);
        state.push_token(token);
        state.note_kv_of_other_node();
        let is_last = state.finish_reason();
        self.forecast.note_drawn_elsewhere(state);
        self.remote_kv.arrive(index, num_rows, &mut self.requests);
        if let Some(reason) = is_last {
            self.finish(index, reason, None);
        }
        true
    }

    /// Reports that all rows of a reserved request are in its pages, and that no token was drawn after them: its last
    /// known token is computed again, and the next one is drawn here. With recurrent layers, more tokens are computed
    /// again, because the state before the last one has not arrived. Returns the same as
    /// [`handle_kv_arrived`](Self::handle_kv_arrived).
    pub fn handle_rows_arrived(&mut self, id: RequestId) -> bool {
        let Some(index) = self.receiving(id) else {
            return false;
        };
        let state = &mut self.requests[index];
        let num_rows = state.num_known_tokens();
        if self.kv.is_recurrent()
            || state.num_published_blocks() * self.config.page_size == num_rows
        {
            // The row to compute again is in a page that other requests may be reading now. The request starts like any
            // other whose tokens are all cached, from a copy.
            self.stop_receiving(index);
        } else {
            state.set_received_rows(num_rows - 1);
            self.remote_kv
                .arrive(index, num_rows - 1, &mut self.requests);
        }
        true
    }

    /// Reports that all writes to a reserved request's pages have ended, although not all of its KV has arrived. If the
    /// request has ended in the meantime, its held pages are released. Returns false if no pages were held for it.
    pub fn handle_kv_lost(&mut self, id: RequestId, how: LostKv) -> bool {
        let Some(index) = self.receiving(id) else {
            return self.release_hold(id);
        };
        match how {
            LostKv::Recompute => self.stop_receiving(index),
            LostKv::End(reason) => {
                self.stop_receiving(index);
                let error = RequestError::KvNotReceived(reason);
                self.finish(index, FinishReason::Error(error), None);
            }
        }
        true
    }

    fn receiving(&self, id: RequestId) -> Option<RequestIndex> {
        let index = self.requests.find(id)?;
        let is_receiving = self.requests[index].phase() == Phase::Receiving;
        (is_receiving && !self.spills.is_restoring(id)).then_some(index)
    }

    /// Gives up a receiving request's pages, to which all writes have ended, and requeues it.
    pub(super) fn stop_receiving(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        self.remote_kv.end(index, state);
        self.forecast.stop_counting(state);
        let pages = state.tables_mut().take_pages();
        self.kv.unlock_all(pages);
        state.enter(Phase::Waiting);
        state.forget_rows();
        state.leave_path(&mut self.kv);
        let snapshot = state.take_received_state();
        self.waiting.add(index, state, &self.pace);
        self.drop_snapshot(snapshot);
    }

    /// Removes a leaving request that waits for KV. If its KV had not arrived yet, late writes may still reach its
    /// pages, so the pages are held.
    pub(super) fn leave_remote_kv(&mut self, index: RequestIndex, phase: Phase) {
        let state = &mut self.requests[index];
        self.forecast.stop_counting(state);
        if phase == Phase::Arrived {
            self.remote_kv.remove_arrived(index);
            return;
        }
        self.remote_kv.end(index, state);
        let pages = state.tables_mut().take_pages();
        state.truncate_computed(0);
        let request = state.id();
        match self.spills.is_restoring(request) {
            true => self.spills.keep_for_writer(request, pages),
            false => {
                let snapshot = state.take_received_state();
                self.holds.insert(request, (pages, snapshot), None);
            }
        }
        state.leave_path(&mut self.kv);
    }

    /// Ends the requests whose KV has missed its deadline.
    pub(super) fn end_late_remote_kv(&mut self) {
        while let Some(index) = self.remote_kv.first_late(self.pace.now_us()) {
            let reason = "it was not there at the deadline".into();
            let error = RequestError::KvNotReceived(reason);
            self.finish(index, FinishReason::Error(error), None);
        }
    }

    /// Gives slots to requests whose KV has arrived, by rank, and plans their next token.
    pub(super) fn start_arrived(&mut self, plan: &mut StepPlan) {
        while let Some(index) = self.remote_kv.first_arrived() {
            let has_budget = plan.budget.tokens_left > 0
                && plan.entries.len() < self.config.max_decode_seqs as usize;
            if self.running.num_free_slots() == 0
                || !has_budget
                || !self.has_page_for_row(index, plan)
            {
                return;
            }
            self.remote_kv.remove_arrived(index);
            self.start_with_kv(index, plan);
        }
    }

    /// Makes sure that the page table of a request without a slot has room for its next position. If no page is free
    /// and no running or leaving request could free one, preempts the youngest arrived requests for their pages.
    fn has_page_for_row(&mut self, index: RequestIndex, plan: &mut StepPlan) -> bool {
        loop {
            let state = &mut self.requests[index];
            let num_rows = state.tables().len() as u32 * self.config.page_size;
            if state.num_scheduled_tokens() < num_rows {
                return true;
            }
            let num_entries = state.tables().len();
            if self.kv.try_extend(state.tables_mut(), |_| num_entries + 1) {
                let num_pages = state.tables().num_groups();
                self.forecast.note_taken(state, num_pages);
                return true;
            }
            plan.is_short_of_pages = true;
            let is_quiet = self.running.is_empty() && self.inflight.is_empty();
            let is_leaving = self.running.num_leaving() > 0 || self.spills.is_storing();
            let last = self.remote_kv.last_arrived();
            match last.filter(|_| is_quiet && !is_leaving) {
                Some(last) if last != index => self.preempt(last),
                Some(_) if !self.waits_for_kv() => {
                    let num_pages = self.config.num_pages;
                    let error = RequestError::PoolExhausted { num_pages };
                    self.finish(index, FinishReason::Error(error), None);
                    return false;
                }
                _ => return false,
            }
        }
    }

    /// Gives a slot to a request whose KV has arrived, and computes its last token.
    fn start_with_kv(&mut self, index: RequestIndex, plan: &mut StepPlan) {
        let slot = self.running.take_slot();
        let state = &mut self.requests[index];
        state.start(slot, plan.batch.step);
        state.prefill_to(state.num_scheduled_tokens());
        self.give_back_pages(index);
        let state = &mut self.requests[index];
        let snapshot = state.take_received_state();
        if let Some(id) = snapshot {
            self.kv.name_snapshot(id, plan.batch.step);
        }
        self.drop_snapshot(snapshot);
        let state = &self.requests[index];
        plan.start_slot(state, slot, snapshot);
        plan.start_tables(state, slot);
        self.note_admitted(index);
        self.running.insert(index, &self.requests);
        self.plan_span(index, 1, plan);
        self.forecast.recount(&mut self.requests[index]);
    }
    /// Counts the prompt of a request whose KV has arrived, when the request first gets a slot or loses its pages
    /// before that.
    pub(super) fn note_admitted(&mut self, index: RequestIndex) {
        let now_us = self.pace.now_us();
        let state = &mut self.requests[index];
        let num_cached_tokens = state.num_published_blocks() * self.config.page_size;
        if state.admit(num_cached_tokens, FetchedTokens::default(), now_us) {
            self.journal.counters().num_prompt_tokens += u64::from(state.num_prompt_tokens());
        }
    }
}
