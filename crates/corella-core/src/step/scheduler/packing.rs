//! Packing starts the smallest of the first few requests together, while they fit into the step's tokens and the free
//! pages.

use alloc::vec::Vec;

use crate::Scheduler;
use crate::step::step_plan::StepPlan;

impl Scheduler {
    /// Whether this round starts requests in order of arrival despite packing: the first has been passed over too
    /// often, no limit bounds a step's prefill, or it is the turn of a FIFO round.
    pub(super) fn is_fifo_round(&self, force_fifo_every: u32) -> bool {
        let is_head_aged = self.waiting.first().is_some_and(|head| {
            self.requests[head].num_passed_over() >= self.config.max_passed_over
        });
        let limit = self
            .config
            .max_prefill_tokens
            .min(self.config.max_num_batched_tokens);
        let every = u64::from(force_fifo_every);
        is_head_aged
            || limit == u32::MAX
            || (every > 0 && self.waiting.num_admission_rounds().is_multiple_of(every))
    }

    /// Chooses the smallest of the first `lookahead` requests as long as they fit, and starts the
    /// chosen ones in order of arrival. When none fits, the first is tried alone.
    pub(super) fn admit_packed(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if !self.has_room_to_start(plan) {
            return;
        }
        let considered = self.waiting.in_order().take(lookahead as usize);
        let considered: Vec<_> = considered.collect();
        let candidates: Vec<_> = considered
            .into_iter()
            .filter_map(|index| self.candidate(index, plan).ok())
            .collect();
        let mut by_size: Vec<usize> = (0..candidates.len()).collect();
        by_size.sort_by_key(|&at| candidates[at].num_uncached_tokens);

        let mut num_tokens = plan.budget.prefill_room();
        let mut num_available = self.kv.num_available();
        let mut forecast = self.forecast.pages().clone();
        let num_seqs = (plan.budget.prefill_seqs_left as usize).min(self.running.num_free_slots());
        let mut chosen: Vec<usize> = Vec::new();
        for at in by_size {
            let candidate = &candidates[at];
            if chosen.len() < num_seqs
                && candidate.num_uncached_tokens <= num_tokens
                && candidate.num_new_pages <= num_available
                && candidate.num_new_pages + forecast.peak_with(&candidate.demand) <= num_available
            {
                num_tokens -= candidate.num_uncached_tokens;
                num_available -= candidate.num_new_pages;
                forecast.add(&candidate.demand);
                chosen.push(at);
            }
        }
        if chosen.is_empty() {
            if let Some(head) = candidates.first() {
                let _ = self.try_start(head.index, plan);
            }
            return;
        }
        chosen.sort_unstable();
        // Each request is looked up again, because a start can change the next request's cached prefix.
        chosen.retain(|&at| self.try_start(candidates[at].index, plan).is_ok());
        let overtaken_before = chosen.last().copied().unwrap_or(0);
        for at in (0..overtaken_before).filter(|at| !chosen.contains(at)) {
            let num_passed_over = self.requests[candidates[at].index].note_passed_over();
            let max = &mut self.journal.counters().max_passed_over;
            *max = num_passed_over.max(*max);
        }
    }
}
