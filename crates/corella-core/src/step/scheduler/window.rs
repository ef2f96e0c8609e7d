//! The pages of requests in groups with windows: tables grow with the prompt, and pages outside the window are given
//! back.
//!
//! In groups without a window a request holds the pages of all its known tokens from its start. With a window it takes
//! pages chunk by chunk, and gives them back when no later query reads them, so that a prompt may be longer than the
//! pool. Pages are given back when a step has returned: steps in flight have queries only after the tokens that
//! returned steps have computed.

use crate::request_state::{RequestIndex, RequestState};
use crate::step::step_plan::StepPlan;
use crate::{FinishReason, RequestError, Scheduler};

impl Scheduler {
    /// Takes the pages in groups with windows that the next `num_tokens` prompt tokens of a request need. Returns how
    /// many of these tokens have all their pages.
    pub(super) fn take_window_pages(
        &mut self,
        index: RequestIndex,
        num_tokens: u32,
        plan: &mut StepPlan,
    ) -> u32 {
        let state = &mut self.requests[index];
        let page_size = self.config.page_size;
        let num_inflight_rows = state.num_scheduled_tokens() - state.num_computed_tokens();
        let num_rows_left = state.num_rows_at_once().saturating_sub(num_inflight_rows);
        let num_tokens = num_tokens.min(num_rows_left);
        let num_window_groups =
            self.config.num_kv_groups() - self.config.num_groups_without_window();
        if num_window_groups == 0 || num_tokens == 0 {
            return num_tokens;
        }
        // The tables of groups with a window are the shortest, and grow together.
        let first = state.tables().len();
        let wanted = (state.num_scheduled_tokens() + num_tokens).div_ceil(page_size) as usize;
        let num_affordable = self.kv.num_available() / num_window_groups as usize;
        let end = wanted.min(first + num_affordable);
        if end > first && self.kv.try_extend(state.tables_mut(), |_| end) {
            let num_pages = (end - first) * num_window_groups as usize;
            self.forecast.note_taken(state, num_pages);
            let slot = state.held_slot();
            let groups = &self.config.kv_groups;
            plan.extend_tables(state, slot, |group, table| match groups[group].window {
                Some(_) => first,
                None => table.len(),
            });
        }
        if end < wanted {
            plan.is_short_of_pages = true;
        }
        let num_rows = state.tables().len() as u32 * page_size;
        num_tokens.min(num_rows - state.num_scheduled_tokens())
    }

    /// Makes room when the plan is empty because no prompt gets a page. Returns whether to try again.
    pub(super) fn make_room_for_prompt(&mut self, plan: &StepPlan) -> bool {
        let is_stuck = plan.is_short_of_pages && plan.batch.is_empty() && self.inflight.is_empty();
        if !is_stuck || self.running.prefilling().is_empty() {
            return false;
        }
        if self.frees_pages_soon() {
            return false;
        }
        if self.running.len() > 1 {
            let last = self.running.last().expect("a request runs");
            self.preempt(last);
            self.raise_share();
            return true;
        }
        if self.preempt_arrived() {
            return true;
        }
        if !self.waits_for_locked_pages()
            && let Some(index) = self.running.last()
        {
            let num_pages = self.config.num_pages;
            let error = RequestError::PoolExhausted { num_pages };
            self.finish(index, FinishReason::Error(error), None);
        }
        false
    }

    /// Gives back the pages in groups with windows that no later query of a running request reads.
    pub(super) fn give_back_pages(&mut self, index: RequestIndex) {
        // The request may just have ended.
        let still_runs = self
            .requests
            .get(index)
            .is_some_and(RequestState::is_running);
        if !still_runs {
            return;
        }
        let state = &mut self.requests[index];
        let mut num_gone = 0;
        let (groups, page_size) = (&self.config.kv_groups, self.config.page_size);
        let num_passed = state.num_rows_passed();
        for (group, table) in groups.iter().zip(state.tables_mut().iter_mut()) {
            let first = group.first_page_read(num_passed, page_size);
            let gone = table.take_before(first as usize);
            if gone.len() > 0 {
                num_gone += gone.len();
                self.kv.unlock_all(gone);
            }
        }
        self.forecast.note_given_back(state, num_gone);
    }
}
