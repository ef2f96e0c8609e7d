//! Preempts running requests for a more urgent waiting one, if no other room is left.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::cache::page_forecast::PageForecast;
use crate::cache::page_table::{PageTable, PageTables};
use crate::request_state::{RequestIndex, RequestState};
use crate::step::scheduler::admission::{Candidate, MAX_FOLLOWERS};
use crate::step::step_plan::{StepBudget, StepPlan};
use crate::{PageId, Scheduler};

/// The free resources for a candidate after the preemption of some running requests.
#[derive(Clone)]
struct VictimRoom {
    /// Free slots, without the slots that restored requests will take.
    num_slots: i64,
    num_available: usize,
    num_begun: usize,
    forecast: PageForecast,
}

impl VictimRoom {
    fn fits(&mut self, candidate: &Candidate) -> bool {
        let num_needed = candidate.num_new_pages + self.num_begun;
        self.num_slots > 0
            && num_needed <= self.num_available
            && num_needed + self.forecast.peak_with(&candidate.demand) <= self.num_available
    }
}

impl Scheduler {
    /// Preempts running requests that are less urgent than the most urgent waiting one, if that frees the slot or the
    /// pages that the waiting request needs. Aged requests, requests that this preemption would age, and requests at
    /// the limit of preemptions are exempt: an aged victim would start again in place of the urgent request.
    pub(super) fn preempt_less_urgent(&mut self, plan: &mut StepPlan) {
        if !self.policy.preempts || self.running.num_leaving() > 0 || self.spills.is_storing() {
            return;
        }
        let Some(last) = self.running.last() else {
            return;
        };
        let last_key = self.requests[last].rank().key;
        let urgent = self.most_urgent_waiting(plan);
        if urgent.is_none_or(|(key, _)| key >= last_key) {
            return;
        }
        self.keep_pages_of_running();
        let (key, candidate) = loop {
            let Some((key, head)) = self.most_urgent_waiting(plan) else {
                return;
            };
            match self.candidate(head, plan) {
                Ok(candidate) => break (key, candidate),
                Err(_) if plan.round.num_followers < MAX_FOLLOWERS => {}
                Err(_) => return,
            }
        };
        let aged = self.waiting.oldest_aged(&self.requests);
        if self.policy.lookahead.is_some() && aged.is_some_and(|aged| aged != candidate.index) {
            // The aged request has the next turn.
            return;
        }
        plan.round.aged = aged.and_then(|aged| self.aged_request(aged, plan));
        if self.would_delay_aged(&candidate, plan) {
            return;
        }
        let Some(mut victims) = self.victims_for(&candidate, key) else {
            return;
        };
        victims.sort_unstable();
        let budget = self.budget_without(&victims, plan);
        if self.chunk_len(candidate.num_uncached_tokens, &budget) > 0 {
            for index in victims {
                self.preempt(index);
            }
        }
    }

    /// The requests to preempt, least urgent first, so that the candidate gets a slot and pages. `None` when no
    /// preemption is needed, or when preempting all of them would not suffice.
    fn victims_for(&self, candidate: &Candidate, key: i64) -> Option<Vec<RequestIndex>> {
        let page_size = self.config.page_size;
        let may_go = |state: &RequestState| {
            let num_preemptions = state.num_preemptions();
            !state.is_aged()
                && num_preemptions < self.config.max_preemptions
                && num_preemptions + 1 < self.config.max_passed_over
        };
        let running = || {
            self.running
                .iter()
                .map(|index| (index, &self.requests[index]))
        };
        let victims: Vec<_> = running()
            .rev()
            .take_while(|(_, state)| state.rank().key > key)
            .filter(|(_, state)| may_go(state))
            .collect();
        let held = victims.iter().map(|(_, state)| state.tables().num_pages());
        if candidate.num_new_pages > self.kv.num_available() + held.sum::<usize>() {
            return None;
        }
        let num_pages_won = self.num_pages_won(&victims, &candidate.found.tables);
        // This step's decodes come first, and each may need a new page.
        let begins_page = |state: &RequestState| state.num_total_tokens().is_multiple_of(page_size);
        let num_begun = running().filter(|(_, state)| begins_page(state)).count();
        let num_groups = self.config.kv_groups.len();
        let nobody_gone = VictimRoom {
            num_slots: self.running.num_free_slots() as i64 - self.spills.num_restoring() as i64,
            num_available: self.kv.num_available(),
            num_begun: num_begun * num_groups,
            forecast: self.forecast.pages().clone(),
        };
        let preempt = |room: &mut VictimRoom, at: usize| {
            let state = victims[at].1;
            let num_held_pages = state.tables().num_pages();
            let num_kept_pages = self.forecast.num_kept_pages(state, num_held_pages as u32);
            if let Some(contribution) = state.contribution() {
                room.forecast.remove(contribution, num_held_pages);
                room.forecast.drop_kept_pages(num_kept_pages as usize);
            }
            room.num_available += num_pages_won[at];
            room.num_begun -= usize::from(begins_page(state)) * num_groups;
            room.num_slots += 1;
        };
        // Most attempts are in vain, so the room after preempting all victims is checked first.
        let mut room = nobody_gone.clone();
        for at in 0..victims.len() {
            preempt(&mut room, at);
        }
        if victims.is_empty() || !room.fits(candidate) {
            return None;
        }
        let mut room = nobody_gone;
        let mut num_victims = 0;
        while !room.fits(candidate) && num_victims < victims.len() {
            preempt(&mut room, num_victims);
            num_victims += 1;
        }
        let victims = victims.iter().take(num_victims).map(|&(index, _)| index);
        (num_victims > 0).then(|| victims.collect())
    }

    /// The number of pages that each victim frees, when the victims before it are gone. Pages that are `matched` are
    /// not freed, because the candidate will lock them. A page that several victims hold is freed with the last of
    /// them.
    fn num_pages_won(
        &self,
        victims: &[(RequestIndex, &RequestState)],
        matched: &PageTables,
    ) -> Vec<usize> {
        let mut num_locks_won: BTreeMap<PageId, u32> = BTreeMap::new();
        let mut is_won = |page: PageId| {
            let num_won = num_locks_won.entry(page).or_default();
            *num_won += 1;
            *num_won == self.kv.num_locks(page)
        };
        let mut num_won = |state: &RequestState| {
            let tables = state.tables().iter().zip(matched.iter());
            let tables = tables.zip(&self.config.kv_groups);
            let num_won = tables.map(|((table, matched), group)| {
                let shared = match group.window {
                    None => self.shared_pages(state, table, matched, victims.len()),
                    // With a window, pages of a path may be locked in any order.
                    Some(_) => 0..table.pages.len(),
                };
                let is_free =
                    |page: &PageId| group.window.is_none() || !matched.pages.contains(page);
                let num_alone = table.pages.len() - shared.end;
                let shared = table.pages[shared].iter().copied();
                num_alone + shared.filter(|page| is_won(*page) && is_free(page)).count()
            });
            num_won.sum()
        };
        victims.iter().map(|(_, state)| num_won(state)).collect()
    }

    /// The pages of a victim, in a group without a window, that several victims but no other requests hold. The pages
    /// before this range stay in use when all victims are preempted. The pages after the range belong to the victim
    /// alone.
    fn shared_pages(
        &self,
        state: &RequestState,
        table: &PageTable,
        matched: &PageTable,
        num_victims: usize,
    ) -> core::ops::Range<usize> {
        let is_same = |(left, right): &(&PageId, &PageId)| left == right;
        let same = matched.pages.iter().zip(&table.pages).take_while(is_same);
        let num_matched = same.count();
        // Unpublished pages have one lock, and the number of locks decreases along a path.
        let published = &table.pages[..state.num_published_blocks() as usize];
        let num_locked_by = |num_requests: usize| {
            let has_more = |&page: &PageId| self.kv.num_locks(page) as usize > num_requests;
            published.partition_point(has_more).max(num_matched)
        };
        let num_shared_pages = num_locked_by(1);
        num_locked_by(num_victims).min(num_shared_pages)..num_shared_pages
    }

    /// The budget that the step has left for a starting request, once all running requests except `victims` are
    /// planned. `victims` is sorted.
    fn budget_without(&self, victims: &[RequestIndex], plan: &StepPlan) -> StepBudget {
        let mut budget = plan.budget;
        let stays = |index: &RequestIndex| victims.binary_search(index).is_err();
        let staying = || {
            self.running
                .iter()
                .filter(stays)
                .map(|index| &self.requests[index])
        };
        let num_decodes = staying().filter(|state| state.wants_decode()).count() as u32;
        budget.tokens_left -= num_decodes.min(self.config.max_decode_seqs);
        for state in staying().filter(|state| state.is_prefilling()) {
            let rest = state.num_left_to_prefill();
            let chunk = self.chunk_len(rest, &budget);
            if chunk == 0 {
                break;
            }
            budget.prefill_seqs_left -= 1;
            budget.take_prefill(chunk);
        }
        budget
    }
}
