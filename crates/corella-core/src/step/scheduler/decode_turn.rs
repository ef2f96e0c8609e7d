//! The decodes of a step: their requests, and the page that a row may need.

use crate::request_state::{RequestIndex, RequestState};
use crate::step::step_plan::StepPlan;
use crate::{FinishReason, RequestError, Scheduler};

impl Scheduler {
    /// Plans one token for each running request that decodes. If `max_decode_seqs` or pipeline stages limit the decodes
    /// of a step, the requests alternate. A masked request waits until its last token has been drawn, and the others
    /// are planned without it.
    pub(super) fn continue_decodes(&mut self, plan: &mut StepPlan) {
        let requests = &self.requests;
        let is_pipeline = self.config.num_pipeline_stages > 1;
        let is_here = |state: &RequestState| {
            let needs_last_token = is_pipeline || state.request().is_masked;
            !needs_last_token || state.num_inflight_samples() == 0
        };
        let mut num_wanting = 0;
        let mut wants = |state: &RequestState| {
            let wants = state.wants_decode();
            num_wanting += usize::from(wants);
            wants && is_here(state)
        };
        let mut decodes = self.running.as_slice().to_vec();
        decodes.retain(|&index| wants(&requests[index]));
        let num_decoding = self.running.len() - self.running.prefilling().len();
        let num_shares = match is_pipeline {
            true => self.config.max_inflight_steps as usize,
            false => 1,
        };
        let share = num_decoding.div_ceil(num_shares);
        let max_decodes = share.min(self.config.max_decode_seqs as usize);
        if decodes.len() > max_decodes {
            // Requests that have waited longest go first. A cursor over the ranks would let new requests go before
            // them.
            decodes.sort_unstable_by_key(|&i| (requests[i].last_sample_step(), requests[i].rank()));
            decodes.truncate(max_decodes);
            decodes.sort_unstable_by_key(|&index| requests[index].rank());
        }
        self.forecast
            .pages_mut()
            .advance(decodes.len(), num_wanting);
        for index in decodes {
            // An earlier request of this loop may have preempted this one.
            let state = self.requests.get(index);
            let still_runs = state.is_some_and(RequestState::is_running);
            if still_runs && self.make_room_for_row(index, plan) {
                self.plan_span(index, 1, plan);
            }
        }
    }

    /// Makes sure that the page table holds the next position, preempting other requests if necessary. Returns false if
    /// the request cannot continue in this step.
    fn make_room_for_row(&mut self, index: RequestIndex, plan: &mut StepPlan) -> bool {
        loop {
            let state = &mut self.requests[index];
            let num_entries = state.tables().len();
            let num_rows = num_entries as u32 * self.config.page_size;
            if state.num_scheduled_tokens() < num_rows {
                return true;
            }
            if self.kv.try_extend(state.tables_mut(), |_| num_entries + 1) {
                let num_pages = self.config.kv_groups.len();
                self.forecast.note_taken(state, num_pages);
                let slot = state.held_slot();
                plan.extend_tables(state, slot, |_, _| num_entries);
                return true;
            }
            plan.is_short_of_pages = true;
            if self.frees_pages_soon() {
                return false;
            }
            let victim = self
                .running
                .last()
                .expect("a running request asks for a page, but the running set is empty");
            if victim == index && self.running.len() == 1 {
                if self.preempt_arrived() {
                    continue;
                }
                if self.waits_for_locked_pages() {
                    return false;
                }
                let num_pages = self.config.num_pages;
                let error = RequestError::PoolExhausted { num_pages };
                self.finish(index, FinishReason::Error(error), None);
                return false;
            }
            // Spans are planned by rank, so the last running request has no span in this step yet.
            self.preempt(victim);
            self.raise_share();
            if victim == index {
                return false;
            }
        }
    }

    /// Whether pages will be free without a preemption: a step returns, a copy ends, or a cancelled fetch or hold gives
    /// up its pages.
    pub(super) fn frees_pages_soon(&mut self) -> bool {
        let is_leaving = self.running.num_leaving() > 0 || self.spills.is_storing();
        is_leaving || self.give_up_fetch() || self.give_up_hold()
    }

    /// Preempts the last request whose KV has arrived and that has no slot yet, if any.
    pub(super) fn preempt_arrived(&mut self) -> bool {
        let arrived = self.remote_kv.last_arrived();
        if let Some(arrived) = arrived {
            self.preempt(arrived);
        }
        arrived.is_some()
    }

    /// Whether the only running request has to wait for locked pages. A step in flight locks the pages that it copies
    /// from until it returns, and other nodes lock the pages that they read or write until they have stopped.
    pub(super) fn waits_for_locked_pages(&mut self) -> bool {
        let waits = !self.inflight.is_empty() || self.waits_for_kv();
        if waits {
            self.holds.end_leases(u64::MAX);
        }
        waits
    }
}
