//! Invariants of a request.

use crate::KvGroup;
use crate::cache::kv_cache::KvCache;
use crate::request_state::{Leaving, Phase, RequestState};

impl RequestState {
    /// # Panics
    /// Panics when the state contradicts itself.
    pub fn check_invariants(&self, kv: &KvCache, groups: &[KvGroup]) {
        self.check_positions(kv.page_size());
        self.check_phase();
        self.check_path(kv, groups);
        self.check_tables(kv, groups);
        if self.request.is_masked {
            self.check_masked();
        }
    }

    fn check_positions(&self, page_size: u32) {
        let id = self.id();
        let (computed, scheduled) = (self.num_computed_tokens(), self.num_scheduled_tokens());
        let total = self.num_total_tokens();
        assert!(
            computed <= scheduled && scheduled <= total || matches!(self.phase, Phase::Leaving(_)),
            "request {id} has positions out of order: computed {computed}, scheduled {scheduled}, \
             total {total}"
        );
        let num_drafts = self.drafts().len() as u32;
        assert!(
            scheduled + num_drafts <= self.tables().len() as u32 * page_size,
            "request {id} computes rows that its table does not hold"
        );
        assert!(
            self.num_published_blocks() * page_size <= self.num_known_tokens(),
            "request {id} has published rows of tokens that are not known"
        );
        let (num_scored, num_prompt) = (self.num_scored_tokens(), self.num_prompt_tokens());
        assert!(
            num_scored <= num_prompt && (computed < num_scored || num_scored == num_prompt),
            "request {id} has rows behind which log-probabilities are missing"
        );
        assert!(
            self.num_output_tokens() <= self.max_tokens,
            "request {id} has more output than it may"
        );
    }

    fn check_phase(&self) {
        let id = self.id();
        let is_in_flight = self.num_inflight_steps() > 0;
        let has_slot = self.slot().is_some();
        match self.phase {
            Phase::Waiting => assert!(
                !has_slot && self.tables().is_empty() && self.snapshot().is_none() && !is_in_flight,
                "request {id} waits, but holds a slot, pages or a snapshot, or is in flight"
            ),
            Phase::Receiving | Phase::Arrived => assert!(
                !has_slot && !is_in_flight,
                "request {id} has no KV or no slot yet, but holds a slot or is in flight"
            ),
            Phase::Running => assert!(has_slot, "request {id} runs without a slot"),
            Phase::Leaving(how) => {
                assert!(
                    is_in_flight,
                    "request {id} is leaving, but no step in flight names it"
                );
                assert!(
                    how != Leaving::Reset || self.snapshot().is_none(),
                    "request {id} starts over, and holds a snapshot"
                );
            }
        }
    }

    /// A masked request computes only known tokens, because the next mask depends on them.
    fn check_masked(&self) {
        let id = self.id();
        assert!(
            self.drafts().is_empty() && self.num_inflight_samples() <= 1,
            "masked request {id} is planned behind a token that has not been drawn"
        );
        assert!(
            self.num_scheduled_tokens() <= self.num_known_tokens(),
            "masked request {id} computes a token that is not known"
        );
    }

    /// A request's path leads through published blocks. In groups without a window, the blocks' pages are the pages in
    /// the request's table.
    fn check_path(&self, kv: &KvCache, groups: &[KvGroup]) {
        let id = self.id();
        let mut num_left = self.num_published_blocks() as usize;
        assert_eq!(
            kv.path_len(self.path_end()),
            num_left,
            "request {id}: the length of the path, and the number of published blocks"
        );
        let mut block = self.path_end();
        while let Some(end) = block {
            num_left -= 1;
            for (index, group) in groups.iter().enumerate() {
                let table = self.tables().group(index);
                let is_its = group.window.is_some()
                    || self.tables().is_empty()
                    || kv.page(end, index) == table.page(num_left);
                assert!(
                    is_its,
                    "request {id}: block {end} on its path has other pages than its table"
                );
            }
            block = kv.block_before(end);
        }
        let num_published = self.num_published_blocks();
        assert!(
            self.snapshot()
                .is_none_or(|held| held.num_blocks > num_published),
            "request {id} holds a snapshot of a block on its path"
        );
    }

    /// A running request holds exactly the pages that later queries or other nodes read.
    fn check_tables(&self, kv: &KvCache, groups: &[KvGroup]) {
        if !self.is_running() {
            return;
        }
        let id = self.id();
        assert_eq!(
            self.tables().num_groups(),
            groups.len(),
            "request {id} has another number of page tables than there are groups"
        );
        for (group, table) in groups.iter().zip(self.tables().iter()) {
            let first = group.first_page_read(self.num_rows_passed(), kv.page_size());
            assert_eq!(
                table.num_gone, first as usize,
                "request {id} holds a page outside the window of {group:?}, or lacks a page in the window"
            );
        }
    }
}
