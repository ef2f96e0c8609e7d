//! Invariants of the scheduler. They hold between any two calls; a failed check says which one does
//! not.

use alloc::collections::BTreeMap;

use crate::request_state::{RequestState, Stage};
use crate::{PageId, Scheduler};

impl Scheduler {
    /// # Panics
    /// Panics when the scheduler's state contradicts itself.
    pub fn check_invariants(&self) {
        self.check_locks();
        self.check_requests();
        self.check_slots();
        self.check_receipts();
        self.check_spills();
        self.check_forecast();
        self.kv.check_invariants();
        let ends = self.requests.iter().filter_map(|state| state.path_end);
        self.kv.check_ends(ends);
    }

    /// A page has one lock for each table, each hold and each copy to or from host memory that names
    /// it, one for a step that copies from it, and one if it is pinned.
    fn check_locks(&self) {
        let mut locks: BTreeMap<PageId, u32> = BTreeMap::new();
        for state in self.requests.iter() {
            for page in state.tables.pages().chain(state.donor_pages()) {
                *locks.entry(page).or_default() += 1;
            }
        }
        for page in self.holds.pages().chain(self.spills.locked_pages()) {
            *locks.entry(page).or_default() += 1;
        }
        for page in (0..self.config.num_pages).map(PageId) {
            let num_pins = u32::from(self.kv.is_pinned(page));
            let expected = locks.get(&page).copied().unwrap_or(0) + num_pins;
            let found = self.kv.num_locks(page);
            assert_eq!(
                found, expected,
                "the number of locks of page {page} differs from its uses"
            );
        }
    }

    fn check_requests(&self) {
        let page_size = self.config.page_size;
        let mut num_leaving = 0;
        for state in self.requests.iter() {
            let id = state.request.id;
            let index = self.requests.find(id);
            assert!(index.is_some(), "request {id} cannot be found by its id");
            assert!(
                state.num_computed_tokens <= state.num_scheduled_tokens
                    && state.num_scheduled_tokens <= state.num_total_tokens()
                    || matches!(state.stage, Stage::Leaving(_)),
                "request {id} has positions out of order: computed {}, scheduled {}, total {}",
                state.num_computed_tokens,
                state.num_scheduled_tokens,
                state.num_total_tokens(),
            );
            let num_drafts = state.drafts.len() as u32;
            assert!(
                state.num_scheduled_tokens + num_drafts <= state.tables.len() as u32 * page_size,
                "request {id} computes rows that its table does not hold"
            );
            assert!(
                state.num_published_blocks * page_size <= state.num_known_tokens(),
                "request {id} has published rows of tokens that are not known"
            );
            assert!(
                state.num_scored_tokens <= state.num_prompt_tokens
                    && (state.num_computed_tokens < state.num_scored_tokens
                        || state.num_scored_tokens == state.num_prompt_tokens),
                "request {id} has rows behind which log-probabilities are missing"
            );
            assert!(
                state.num_output_tokens() <= state.max_tokens,
                "request {id} has more output than it may"
            );
            let inflight = self.inflight.iter().flat_map(|step| &step.spans);
            let spans = inflight.filter(|span| self.requests[span.index].request.id == id);
            let in_flight = spans.fold((0, 0), |(num_spans, num_drafts), span| {
                (num_spans + 1, num_drafts + span.num_drafts)
            });
            assert_eq!(
                in_flight,
                (state.num_inflight_steps, num_drafts),
                "request {id} counts other spans or drafts than those in flight"
            );
            match state.stage {
                Stage::Waiting => assert!(
                    state.slot.is_none()
                        && state.tables.is_empty()
                        && state.num_inflight_steps == 0,
                    "request {id} waits, but holds a slot or pages, or is in flight"
                ),
                Stage::Receiving | Stage::Arrived => assert!(
                    state.slot.is_none() && state.num_inflight_steps == 0,
                    "request {id} has no KV or no slot yet, but holds a slot or is in flight"
                ),
                Stage::Running => assert!(state.slot.is_some(), "request {id} runs without a slot"),
                Stage::Leaving(_) => {
                    num_leaving += 1;
                    assert!(
                        state.num_inflight_steps > 0,
                        "request {id} is leaving, but no step in flight names it"
                    );
                }
            }
            if state.request.is_masked {
                self.check_masked(state);
            }
            self.check_path(state);
            self.check_tables(state);
        }
        let never_admitted = self
            .requests
            .iter()
            .filter(|state| state.stage == Stage::Waiting && state.num_cached_tokens.is_none());
        let num_queued_tokens: u64 = never_admitted
            .map(|state| u64::from(state.num_prompt_tokens))
            .sum();
        assert_eq!(
            num_queued_tokens,
            self.waiting.num_new_tokens(),
            "the number of queued tokens is wrong"
        );
        let is_queued = |state: &&RequestState| state.stage == Stage::Waiting && state.is_new();
        let num_queued_requests = self.requests.iter().filter(is_queued).count();
        assert_eq!(
            num_queued_requests,
            self.waiting.num_new(),
            "the number of queued requests is wrong"
        );
        assert_eq!(
            num_leaving,
            self.running.num_leaving(),
            "the number of leaving requests is wrong"
        );
        let listed = self.running.len() + self.waiting.len() + self.receipts.len() + num_leaving;
        assert_eq!(
            listed,
            self.requests.len(),
            "a request is in no list or in two"
        );
        let ranks = self.running.iter().map(|index| self.requests[index].rank);
        assert!(ranks.is_sorted(), "the running set is not sorted by rank");
    }

    /// A request's path leads through published blocks. In groups without a window, their pages are those
    /// of its table.
    fn check_path(&self, state: &RequestState) {
        let id = state.request.id;
        let mut num_left = state.num_published_blocks as usize;
        assert_eq!(
            self.kv.path_len(state.path_end),
            num_left,
            "request {id}: the path and the published blocks"
        );
        let mut block = state.path_end;
        while let Some(end) = block {
            num_left -= 1;
            for (index, group) in self.config.kv_groups.iter().enumerate() {
                let table = state.tables.group(index);
                let is_its = group.window.is_some()
                    || state.tables.is_empty()
                    || self.kv.page(end, index) == table.page(num_left);
                assert!(
                    is_its,
                    "request {id}: another's pages are those of block {end} on its path"
                );
            }
            block = self.kv.block_before(end);
        }
    }

    /// A running request holds the pages that coming queries read, and no others.
    fn check_tables(&self, state: &RequestState) {
        let id = state.request.id;
        if !state.is_running() {
            return;
        }
        assert_eq!(
            state.tables.num_groups(),
            self.config.kv_groups.len(),
            "request {id} has another number of page tables than there are groups"
        );
        for (group, table) in self.config.kv_groups.iter().zip(state.tables.iter()) {
            let first = group.first_page_read(state.num_computed_tokens, self.config.page_size);
            assert_eq!(
                table.num_gone, first as usize,
                "request {id} holds a page behind the window of {group:?}, or lacks one within it"
            );
        }
    }

    /// What a masked request computes is known, because the next mask depends on it.
    fn check_masked(&self, state: &RequestState) {
        let id = state.request.id;
        assert!(
            state.drafts.is_empty() && state.num_inflight_samples <= 1,
            "masked request {id} is planned behind a token that has not been drawn"
        );
        assert!(
            state.num_scheduled_tokens <= state.num_known_tokens(),
            "masked request {id} computes a token that is not known"
        );
    }

    fn check_receipts(&self) {
        let mut num_receiving = 0;
        let mut num_arrived = 0;
        let mut num_exporting_pages = 0;
        for state in self.requests.iter() {
            num_receiving += usize::from(state.stage == Stage::Receiving);
            num_arrived += usize::from(state.stage == Stage::Arrived);
            num_exporting_pages += state.num_exporting_pages as usize;
        }
        let stats = self.stats();
        assert_eq!(
            (num_receiving, num_arrived),
            (stats.num_receiving, stats.num_arrived),
            "receiving and arrived requests"
        );
        self.holds.check_invariants(num_exporting_pages);
    }

    fn check_spills(&self) {
        let mut num_reserved_pages = 0;
        let mut num_spilled = 0;
        for state in self.requests.iter() {
            let id = state.request.id;
            num_reserved_pages += state.num_spill_pages as usize;
            let has_spill = self.spills.has(id);
            num_spilled += usize::from(has_spill);
            assert!(
                state.num_spill_pages == 0 || matches!(state.stage, Stage::Leaving(_)),
                "request {id} has host memory set aside, and is not leaving"
            );
            assert!(
                !has_spill || matches!(state.stage, Stage::Waiting | Stage::Receiving),
                "request {id} has KV in host memory, and its pages too"
            );
            assert!(
                !state.came_with_kv || state.stage != Stage::Waiting || has_spill,
                "request {id} came with KV and would be computed here"
            );
        }
        self.spills.check_invariants(
            self.config.max_spilled_pages,
            num_reserved_pages,
            num_spilled,
        );
    }

    fn check_slots(&self) {
        let num_held = self
            .requests
            .iter()
            .filter(|state| state.slot.is_some())
            .count();
        assert_eq!(
            num_held + self.slots.num_free(),
            self.config.max_num_seqs as usize,
            "a slot is lost or held twice"
        );
    }
    /// The forecast has every request that runs, or receives KV, and nobody else, as it was when it was counted, and
    /// all pages that those hold. Whoever has come so far that it is due has been counted anew.
    fn check_forecast(&self) {
        let running = self.running.iter();
        let holders = running.chain(self.receipts.iter());
        let counted = holders.map(|index| {
            let state = &self.requests[index];
            let id = state.request.id;
            let contribution = state.contribution.as_ref();
            let contribution =
                contribution.unwrap_or_else(|| panic!("request {id} is not counted"));
            (contribution, state.tables.num_pages())
        });
        self.forecast.check_invariants(counted);
        for state in self.requests.iter() {
            let id = state.request.id;
            let is_holder = matches!(
                state.stage,
                Stage::Running | Stage::Receiving | Stage::Arrived
            );
            assert_eq!(
                is_holder,
                state.contribution.is_some(),
                "request {id} is not counted while it holds pages, or is without any"
            );
            // What drafts bring is seen when the next step is planned.
            let is_planned = state.num_inflight_samples > 0
                && state.last_sample_step.0 + 1 == self.inflight.next_step().0;
            let max_rows = state.contribution.map_or(0, |counted| counted.max_rows);
            assert!(
                !is_planned || !state.is_running() || state.num_rows() <= max_rows,
                "request {id} should have been counted anew"
            );
        }
        let prefilling = self.running.iter();
        let prefilling = prefilling.filter(|&index| self.requests[index].is_prefilling());
        assert!(
            prefilling.eq(self.running.prefilling().iter().copied()),
            "those that prefill are listed, by rank"
        );
    }
}
