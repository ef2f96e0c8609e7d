//! The pages that starting a waiting request takes, and its start.

use crate::cache::kv_cache::{Donor, FoundPrefix};
use crate::cache::page_forecast::PageDemand;
use crate::cache::page_table::PageTables;
use crate::queue::follower::{leader_of, num_shared_blocks};
use crate::request_state::{Leader, RequestIndex, RequestState};
use crate::step::step_plan::{StepBudget, StepPlan};
use crate::{FetchedTokens, PageCopy, PageId, Scheduler, StepId};

/// The limit of followers that one step finds. A follower leaves the queue, so later steps do not look at it again.
pub(crate) const MAX_FOLLOWERS: usize = 64;

/// The reason why a waiting request does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// The step has no tokens left, too few pages are free, or no slot is free.
    NoRoom,
    /// Another request, or a fetch, is about to publish the next block that this request needs.
    ByLeader,
    /// The request would delay another one that was passed over too often.
    ByAged,
}

/// The cost of starting a waiting request in this step.
pub(crate) struct Candidate {
    pub index: RequestIndex,
    pub found: FoundPrefix,
    num_matched_tokens: u32,
    /// The number of leading rows that the request does not compute: the matched rows or, if they are more, the rows
    /// that another node or host memory fills.
    num_ready_rows: u32,
    pub num_uncached_tokens: u32,
    /// The number of pages that are no longer available when the request has started.
    pub num_new_pages: usize,
    /// The demand of the request after its start.
    pub demand: PageDemand,
}

impl Candidate {
    /// Pages that are available now and that the request is expected to hold when it ends.
    pub fn num_needed_pages(&self) -> usize {
        self.num_new_pages + self.demand.num_future_pages() as usize
    }
}

impl Scheduler {
    pub(super) fn try_start(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Result<(), Held> {
        if !self.has_room_to_start(plan) {
            return Err(Held::NoRoom);
        }
        if self.spills.has(self.requests[index].id()) {
            return self.try_restore(index, plan);
        }
        let candidate = self.candidate(index, plan)?;
        let chunk = self.chunk_len(candidate.num_uncached_tokens, &plan.budget);
        let chunk = chunk.min(self.requests[index].num_rows_at_once());
        let has_room_for_facts =
            !self.requests[index].request().exports_kv || self.holds.has_room_for_facts();
        if chunk == 0 || !has_room_for_facts || !self.has_pages_for(&candidate) {
            return Err(Held::NoRoom);
        }
        if self.would_delay_aged(&candidate, plan) {
            return Err(Held::ByAged);
        }
        self.start(candidate, chunk, plan);
        Ok(())
    }

    pub(super) fn has_room_to_start(&self, plan: &StepPlan) -> bool {
        self.running.num_free_slots() > self.spills.num_restoring()
            && plan.budget.prefill_room() > 0
            && plan.round.num_followers < MAX_FOLLOWERS
    }

    pub(super) fn has_pages_for(&mut self, candidate: &Candidate) -> bool {
        let num_available = self.kv.num_available();
        candidate.num_new_pages <= num_available
            && candidate.num_new_pages + self.forecast.pages_mut().peak_with(&candidate.demand)
                <= num_available
    }

    /// How many of a request's `rest` remaining prompt tokens the step may compute.
    pub(super) fn chunk_len(&self, rest: u32, budget: &StepBudget) -> u32 {
        let room = budget.prefill_room();
        if !self.config.enable_chunked_prefill {
            let is_alone = room > 0 && budget.num_prefill_tokens == 0;
            let fits = rest <= room || is_alone && rest <= budget.tokens_left;
            return if fits { rest } else { 0 };
        }
        let most = room.min(self.config.max_chunk_tokens);
        match self.config.long_prefill_token_threshold {
            0 => rest.min(most),
            threshold => rest.min(most).min(threshold),
        }
    }

    /// Looks a waiting request up in the prefix tree and counts its pages. If the request has a leader, it becomes a
    /// follower and waits.
    pub(super) fn candidate(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Result<Candidate, Held> {
        let state = &self.requests[index];
        let mut found = FoundPrefix::nothing(self.config.kv_groups.len());
        if self.spills.has(state.id()) {
            // In the namespace of another arithmetic, only received rows are looked up. The request computes the later
            // rows itself, and the tree may have them with other bits.
            found = self.ready_prefix(index, state.num_rows().min(state.num_publishable_rows()));
        } else if self.config.enable_prefix_caching {
            found = self.find_waiting(index, plan.batch.step);
            if let Some((leader, num_blocks)) = self.leader_of(index, &found, plan.batch.step) {
                plan.round.num_followers += 1;
                let state = &mut self.requests[index];
                self.waiting.follow(index, state, leader, num_blocks);
                return Err(Held::ByLeader);
            }
        }
        self.forecast.expect_output(&mut self.requests[index]);
        let state = &mut self.requests[index];
        state.limit_rows_at_once(self.config.num_rows_at_once(state.num_known_tokens()));
        let num_restored_rows = match self.spills.has(state.id()) {
            true => state.num_rows(),
            false => 0,
        };
        let candidate = self.count_candidate(index, found, num_restored_rows);
        let num_cached = self.num_cached_donors(&candidate.found);
        if num_cached == 0 || self.has_pages_for(&candidate) {
            return Ok(candidate);
        }
        // Without the donor, the request computes the donor's rows itself, in pages that it takes in any case.
        let mut found = candidate.found;
        found.donor = None;
        found.tables = self.kv.tables_of(&found.path);
        Ok(self.count_candidate(index, found, num_restored_rows))
    }

    /// The prefilling request or the fetch, if any, that is about to publish this request's next block, and the number
    /// of blocks to wait for.
    fn leader_of(
        &self,
        index: RequestIndex,
        found: &FoundPrefix,
        step: StepId,
    ) -> Option<(Leader, u32)> {
        let ahead = match self.kv.is_recurrent() {
            true => self.snapshot_leader_of(index, found, step),
            false => self.prefilling_leader_of(index, found),
        };
        if ahead.is_some() {
            return ahead;
        }
        let state = &self.requests[index];
        let (namespace, num_found) = (&state.request().namespace, found.path.len() as u32);
        let tokens = &state.tokens()[..state.max_cached_tokens()];
        let fetches = self.holds.fetches();
        let (fetch, num_blocks) = fetches.leader_of(namespace, tokens, num_found, &self.kv)?;
        Some((Leader::Fetch(fetch), num_blocks))
    }

    fn prefilling_leader_of(
        &self,
        index: RequestIndex,
        found: &FoundPrefix,
    ) -> Option<(Leader, u32)> {
        let page_size = self.config.page_size;
        let state = &self.requests[index];
        let prefilling = self.running.prefilling();
        let leader = leader_of(state, found, prefilling, &self.requests, page_size)?;
        let (ahead, num_found) = (&self.requests[leader], found.path.len());
        let num_blocks = num_shared_blocks(state, ahead, num_found, page_size);
        Some((Leader::Request(leader), num_blocks))
    }

    /// The number of a donor's pages that are available now. They are not available any more when the request has
    /// locked them.
    fn num_cached_donors(&self, found: &FoundPrefix) -> usize {
        let donors = found.donor.iter().flat_map(|donor| &donor.pages);
        donors.filter(|&&page| !self.kv.is_locked(page)).count()
    }

    /// Counts the pages that a request needs after its found prefix. Another node or host memory fills `num_given_rows`
    /// of the request's rows before the request starts.
    pub(super) fn count_candidate(
        &self,
        index: RequestIndex,
        mut found: FoundPrefix,
        num_given_rows: u32,
    ) -> Candidate {
        let state = &self.requests[index];
        let num_matched_tokens = found.num_rows(self.config.page_size);
        let num_ready_rows = num_matched_tokens.max(num_given_rows);
        let groups = self.config.kv_groups.iter();
        for (group, table) in groups.zip(found.tables.iter_mut()) {
            // With copied, restored or received rows, a window begins later than right after the found blocks.
            let first = group.first_page_read(num_ready_rows, self.config.page_size);
            table.take_before(first as usize);
        }
        let (num_in_use, num_shared) = self.num_found_in_use(&found.tables);
        let num_pages = self.num_first_pages(state, &found.tables, num_ready_rows);
        let num_donors = self.num_cached_donors(&found);
        Candidate {
            index,
            num_matched_tokens,
            num_ready_rows,
            num_uncached_tokens: state.num_known_tokens() - num_matched_tokens,
            num_new_pages: num_pages - num_in_use + num_donors,
            demand: self
                .forecast
                .page_demand(state, num_pages as u32, num_shared as u32),
            found,
        }
    }

    /// Finds a waiting request's tokens in the prefix tree. A request that waits long is looked up often, so it
    /// remembers the result.
    pub(super) fn find_waiting(&mut self, index: RequestIndex, step: StepId) -> FoundPrefix {
        let state = &mut self.requests[index];
        state.find_prefix(&self.kv, step)
    }

    /// How many of the pages found for a candidate are in use, and how many of them other requests will still hold when
    /// the candidate ends.
    fn num_found_in_use(&self, found: &PageTables) -> (usize, usize) {
        let (mut num_in_use, mut num_shared) = (0, 0);
        for (group, table) in self.config.kv_groups.iter().zip(found.iter()) {
            let is_locked = |page: &PageId| self.kv.is_locked(*page);
            if group.window.is_some() {
                num_in_use += table.pages.iter().filter(|page| is_locked(page)).count();
                continue;
            }
            // The locked pages of a path come before the others.
            let count = table.pages.partition_point(is_locked);
            num_in_use += count;
            num_shared += count;
        }
        (num_in_use, num_shared)
    }

    /// The pages that a request holds when it starts: the found ones, and those to fill.
    fn num_first_pages(&self, state: &RequestState, found: &PageTables, num_rows: u32) -> usize {
        let first_len = |group| self.first_table_len(state, num_rows, group);
        let tables = found.iter().enumerate();
        let num_pages = tables.map(|(group, table)| first_len(group) - table.num_gone);
        num_pages.sum()
    }

    fn first_table_len(&self, state: &RequestState, num_ready_rows: u32, group: usize) -> usize {
        let (num_known, at_once) = (state.num_known_tokens(), state.num_rows_at_once());
        self.config
            .first_table_len(num_known, at_once, num_ready_rows, group)
    }

    /// Counts the tokens that a request finds in the cache. Returns how many of a new request's tokens a fetch has
    /// brought for it.
    fn count_hits(&mut self, candidate: &Candidate, step: StepId) -> FetchedTokens {
        let state = &self.requests[candidate.index];
        let num_matched_tokens = u64::from(candidate.num_matched_tokens);
        let counters = self.journal.counters();
        counters.num_prefix_query_tokens += u64::from(state.num_known_tokens());
        counters.num_prefix_hit_tokens += num_matched_tokens;
        let hits = &mut counters.prefix_hits;
        if !state.is_new() {
            hits.num_resumed_tokens += num_matched_tokens;
            return FetchedTokens::default();
        }
        let FoundPrefix { path, donor, .. } = &candidate.found;
        // On a path, the blocks of this step come after the blocks of earlier steps.
        let blocks = path.iter().rev();
        let filled_by = blocks.map(|&block| self.kv.block_filled_by(block));
        let num_shared_pages = filled_by.take_while(|filled_by| *filled_by == Some(step));
        let num_shared_pages = num_shared_pages.count();
        if let Some(&end) = path[..path.len() - num_shared_pages].last() {
            self.kv.note_reused(end);
        }
        let num_shared_pages = num_shared_pages as u64;
        let num_shared_tokens = num_shared_pages * u64::from(self.config.page_size);
        let num_copied_tokens = donor.as_ref().map_or(0, |donor| u64::from(donor.num_rows));
        hits.num_shared_tokens += num_shared_tokens;
        hits.num_copied_tokens += num_copied_tokens;
        hits.num_cached_tokens += num_matched_tokens - num_shared_tokens - num_copied_tokens;
        self.kv.use_fetched(path)
    }

    /// Removes a request from the queue and gives it its first pages.
    pub(super) fn take_pages(&mut self, candidate: &Candidate, plan: &mut StepPlan) {
        let index = candidate.index;
        self.waiting.take_out(index, &mut self.requests[index]);
        self.hold_first_pages(candidate);
        let state = &mut self.requests[index];
        state.end_turn();
        self.holds.fetches_mut().unbar();
        plan.round.latest_ticket = plan.round.latest_ticket.max(Some(state.ticket()));
        if self.policy.overtakes {
            let num_passed_over = self.waiting.num_passed_over(state.ticket());
            let max = &mut self.journal.counters().max_passed_over;
            *max = num_passed_over.max(*max);
        }
    }

    /// Locks the pages that were found for a request, and gives it the pages to fill.
    pub(super) fn hold_first_pages(&mut self, candidate: &Candidate) {
        let Candidate { index, found, .. } = candidate;
        for page in found.tables.pages() {
            self.kv.lock(page);
        }
        // The request's path is set first, so that the eviction of pages for the request leaves its blocks in the tree.
        let state = &mut self.requests[*index];
        let num_blocks = found.path.len() as u32;
        state.begin_path(&mut self.kv, found.path.last().copied(), num_blocks);
        if let Some(donor) = &found.donor {
            for &page in &donor.pages {
                self.kv.lock(page);
            }
            state.copy_from(donor, self.inflight.next_step());
        }
        let mut tables = found.tables.clone();
        let config = &self.config;
        let (num_known, at_once) = (state.num_known_tokens(), state.num_rows_at_once());
        let has_pages = self.kv.try_extend(&mut tables, |group| {
            config.first_table_len(num_known, at_once, candidate.num_ready_rows, group)
        });
        state.hold_pages(tables, candidate.demand.num_shared_pages);
        assert!(
            has_pages,
            "fewer pages are free than were counted for a candidate"
        );
        state.begin_at(candidate.num_matched_tokens);
    }

    /// Gives a request a slot and all pages of its known tokens, and plans the first chunk.
    fn start(&mut self, candidate: Candidate, chunk: u32, plan: &mut StepPlan) {
        let fetched_tokens = match self.config.enable_prefix_caching {
            true => self.count_hits(&candidate, plan.batch.step),
            false => FetchedTokens::default(),
        };
        self.take_pages(&candidate, plan);
        let Candidate { index, found, .. } = candidate;
        let now_us = self.pace.now_us();
        let slot = self.running.take_slot();
        let end = found.path.last();
        let snapshot = end.and_then(|&end| self.kv.restore_snapshot(end, plan.batch.step));
        let state = &mut self.requests[index];
        state.start(slot, plan.batch.step);
        state.set_restored_block(end.copied().filter(|_| snapshot.is_some()));
        state.prefill_to(state.num_known_tokens());
        self.set_branch(index, &found);
        let state = &mut self.requests[index];
        plan.start_slot(state, slot, snapshot);
        plan.start_tables(state, slot);
        if let Some(Donor { pages, num_rows }) = found.donor {
            let own = state
                .tables()
                .iter()
                .map(|table| table.page(found.path.len()));
            for (from, to) in pages.into_iter().zip(own) {
                let to = to.expect("the table has an entry for the rows that are copied");
                plan.copy_rows(PageCopy { from, to, num_rows });
            }
        }

        if state.admit(candidate.num_matched_tokens, fetched_tokens, now_us) {
            self.journal.counters().num_prompt_tokens += u64::from(state.num_prompt_tokens());
        }

        self.running.insert(index, &self.requests);
        if self.requests[index].request().exports_kv {
            self.begin_export(index);
        }
        let chunk = self.end_at_snapshot(index, chunk, plan.batch.step);
        self.plan_span(index, chunk, plan);
        self.forecast.count(&mut self.requests[index]);
    }
}
