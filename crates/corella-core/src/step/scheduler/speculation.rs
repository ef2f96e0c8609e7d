//! Speculation: guesses of the next tokens, which the step of a decode computes and checks.
//!
//! A step is first planned without guesses; the rest of its budget then goes to drafts. Drafts preempt no request, and
//! take only pages that no other request is expected to need. A draw after a draft counts only if the executor has
//! drawn the same token as the draft, so outputs equal those of a run without speculation. `feedback.rs` processes the
//! draws.

use alloc::vec::Vec;

use crate::request_state::{RequestIndex, RequestState};
use crate::step::step_plan::StepPlan;
use crate::{RequestId, Scheduler, SlotStart, Speculation, TokenId};

/// A request that could use guesses in the next step.
#[derive(Debug)]
pub struct DraftRequest<'a> {
    /// The request's slot and sampling parameters. A draft model that draws with the same parameters at the same
    /// position guesses better. `cached_tokens` is empty.
    pub start: SlotStart,
    /// The prompt and the output so far.
    pub tokens: &'a [TokenId],
    /// The number of drafts that the step can use, at least 1.
    pub max_drafts: u32,
}

impl Scheduler {
    /// The requests that could use a draft model's guesses in the next step, each with the number of guesses. The list
    /// is empty with another kind of speculation, while a step is in flight, or when a prompt is about to take the rest
    /// of the step.
    pub fn draft_requests(&mut self) -> Vec<DraftRequest<'_>> {
        let is_asked = matches!(self.config.speculation, Speculation::Draft { .. });
        if !is_asked || !self.inflight.is_empty() {
            return Vec::new();
        }
        let requests = &mut self.requests;
        let running = self.running.iter();
        let decoding: Vec<_> = running.filter(|&i| requests[i].wants_decode()).collect();
        let num_decodes = (decoding.len() as u32).min(self.config.max_decode_seqs);
        let running = self.running.iter().map(|index| &requests[index]);
        let prefilling = running.filter(|state| state.is_prefilling());
        let max_chunk = self.config.max_chunk_tokens;
        let num_to_prefill = match self.waiting.len() == 0 || self.running.num_free_slots() == 0 {
            true => { prefilling }
                .map(|state| state.num_left_to_prefill().min(max_chunk))
                .sum(),
            // A starting request takes all prefill tokens that are left.
            false => u32::MAX,
        };
        let num_taken =
            num_decodes.saturating_add(num_to_prefill.min(self.config.max_prefill_tokens));
        let mut num_tokens = self.config.max_num_batched_tokens.saturating_sub(num_taken);
        let mut num_left = decoding.len() as u32;
        let mut asked = Vec::with_capacity(decoding.len());
        for index in decoding {
            let share = num_tokens.div_ceil(num_left);
            num_left -= 1;
            let state = &mut requests[index];
            // One token is drawn after the last draft, so the drafts leave room for it.
            let max = (state.max_tokens() - state.num_output_tokens() - 1)
                .min(share)
                .min(self.config.max_draft_tokens);
            let max_drafts = state.num_drafts_to_ask(max);
            num_tokens -= max_drafts;
            if max_drafts > 0 {
                asked.push((index, max_drafts));
            }
        }
        let requests = &self.requests;
        let request = |(index, max_drafts): (RequestIndex, u32)| {
            let state: &RequestState = &requests[index];
            let slot = state.held_slot();
            DraftRequest {
                start: state.slot_start(slot, 0),
                tokens: state.tokens(),
                max_drafts,
            }
        };
        asked.into_iter().map(request).collect()
    }

    /// Gives a request drafts after its current tokens. The next step that computes the newest of these tokens includes
    /// the drafts, as far as it has room.
    pub fn give_drafts(&mut self, id: RequestId, drafts: Vec<TokenId>) {
        let Some(index) = self.requests.find(id) else {
            return;
        };
        let state = &mut self.requests[index];
        state.give_drafts(drafts);
    }

    /// Shares the tokens left in the step among its decodes, for drafts.
    pub(super) fn plan_drafts(&mut self, plan: &mut StepPlan) {
        if self.config.speculation == Speculation::Off || plan.budget.tokens_left == 0 {
            return;
        }
        let is_decode = |plan: &StepPlan, at: usize| {
            let span = &plan.batch.spans[at];
            span.yields.draws() && span.tokens.len() == 1 && !plan.takes_snapshot_of(span.slot)
        };
        let at_all = 0..plan.entries.len();
        let mut num_decodes = at_all.clone().filter(|&at| is_decode(plan, at)).count() as u32;
        let mut num_tokens = plan.budget.tokens_left;
        self.keep_pages_of_running();
        for at in at_all {
            if !is_decode(plan, at) {
                continue;
            }
            let share = num_tokens.div_ceil(num_decodes);
            let num_drafts = self.draft(plan.entries[at].index, share, plan);
            plan.entries[at].num_drafts = num_drafts;
            self.journal.counters().num_drafts += u64::from(num_drafts > 0);
            num_tokens -= num_drafts;
            num_decodes -= 1;
        }
        let num_drafts = plan.budget.tokens_left - num_tokens;
        if num_drafts > 0 {
            self.journal.counters().num_draft_tokens += u64::from(num_drafts);
            plan.insert_drafts(&self.requests);
        }
    }

    /// Guesses up to `max` tokens after the request's token in the step, and allocates their pages. Returns the number
    /// of drafts.
    fn draft(&mut self, index: RequestIndex, max: u32, plan: &mut StepPlan) -> u32 {
        let max = max.min(self.num_drafts_before_snapshot(index));
        let demand = self.forecast.demand_of_running(&self.requests[index]);
        let num_own_pages = self.forecast.pages().num_own_pages(&demand);
        let state = &mut self.requests[index];
        // The token drawn after the last draft may be the request's last.
        let num_left = state.max_tokens() - (state.num_drawn_tokens());
        let Some(speculator) = state.speculator_mut() else {
            return 0;
        };
        let max = speculator
            .num_wanted(self.config.max_draft_tokens)
            .min(max)
            .min(num_left);
        if max > 0 {
            state.propose_drafts(max);
        }
        let page_size = self.config.page_size;
        let num_rows = state.num_scheduled_tokens() + state.drafts().len() as u32;
        let first_new = state.tables().len();
        let num_entries = (num_rows.div_ceil(page_size) as usize).saturating_sub(first_new);
        let num_pages = num_entries * self.config.kv_groups.len();
        if num_pages > 0 {
            let num_others_pages = self.forecast.pages().peak().saturating_sub(num_own_pages);
            let has_pages = !plan.is_short_of_pages
                && num_others_pages + num_pages <= self.kv.num_available()
                && (self.waiting.len() == 0 || num_pages <= num_own_pages);
            let end = first_new + num_entries;
            if has_pages && self.kv.try_extend(state.tables_mut(), |_| end) {
                let slot = state.held_slot();
                plan.extend_tables(state, slot, |_, _| first_new);
                let num_kept_pages = num_pages.min(demand.num_kept_pages as usize);
                self.forecast.pages_mut().drop_kept_pages(num_kept_pages);
                self.forecast.note_taken(state, num_pages);
            } else {
                let num_free_rows = first_new as u32 * page_size - state.num_scheduled_tokens();
                state.truncate_drafts(num_free_rows);
            }
        }
        let num_drafts = state.drafts().len() as u32;
        if let Some(speculator) = state.speculator_mut() {
            speculator.drop_given(num_drafts);
        }
        num_drafts
    }
}
