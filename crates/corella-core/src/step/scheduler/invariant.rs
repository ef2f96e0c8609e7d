//! Invariants of the scheduler. They hold between any two calls. A failed check names the broken invariant.

use alloc::collections::BTreeMap;

use crate::request_state::Phase;
use crate::{PageId, Scheduler};

impl Scheduler {
    /// # Panics
    /// Panics when the scheduler's state contradicts itself.
    pub fn check_invariants(&self) {
        self.check_locks();
        self.check_requests();
        self.check_remote_kv();
        self.check_spills();
        self.check_forecast();
        self.kv.check_invariants();
        let fetches = self.holds.fetches();
        fetches.check_invariants(&self.kv);
        let ends = self.requests.iter().filter_map(|state| state.path_end());
        self.kv.check_ends(ends.chain(fetches.ends()));
        let of_requests = self.requests.iter().flat_map(|state| {
            let held = state.snapshot().map(|held| held.id);
            [held, state.export().state(), state.received_state()]
        });
        let held = of_requests.flatten().chain(self.holds.states());
        let held = held.chain(fetches.states());
        self.kv.check_held_snapshots(held);
    }

    /// A page has one lock for each table, each hold (of a request or of blocks), each fetch and each copy to or from
    /// host memory that names it, one for a step that copies from it, and one if it is pinned.
    fn check_locks(&self) {
        let mut locks: BTreeMap<PageId, u32> = BTreeMap::new();
        for state in self.requests.iter() {
            for page in state.tables().pages().chain(state.donor_pages()) {
                *locks.entry(page).or_default() += 1;
            }
        }
        let moved = self.holds.pages().chain(self.spills.locked_pages());
        let moved = moved.chain(self.holds.fetches().locked_pages());
        for page in moved.chain(self.holds.of_blocks().pages()) {
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
        for state in self.requests.iter() {
            let id = state.id();
            let index = self.requests.find(id);
            assert!(index.is_some(), "request {id} cannot be found by its id");
            state.check_invariants(&self.kv, &self.config.kv_groups);
            let inflight = self.inflight.iter().flat_map(|step| &step.spans);
            let spans = inflight.filter(|span| self.requests[span.index].id() == id);
            let in_flight = spans.fold((0, 0), |(num_spans, num_drafts), span| {
                (num_spans + 1, num_drafts + span.num_drafts)
            });
            assert_eq!(
                in_flight,
                (state.num_inflight_steps(), state.drafts().len() as u32),
                "request {id} counts other spans or drafts than those in flight"
            );
        }
        self.waiting.check_invariants(&self.requests);
        self.running
            .check_invariants(&self.requests, self.config.max_num_seqs);
        let num_unslotted = self.waiting.len() + self.remote_kv.len();
        let listed = self.running.len() + self.running.num_leaving() + num_unslotted;
        assert_eq!(
            listed,
            self.requests.len(),
            "a request is in no list or in two"
        );
    }

    fn check_remote_kv(&self) {
        let mut num_receiving = 0;
        let mut num_arrived = 0;
        let mut num_exporting_pages = 0;
        for state in self.requests.iter() {
            num_receiving += usize::from(state.phase() == Phase::Receiving);
            num_arrived += usize::from(state.phase() == Phase::Arrived);
            num_exporting_pages += state.export().num_pages() as usize;
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
            let id = state.id();
            num_reserved_pages += state.num_spill_pages() as usize;
            let has_spill = self.spills.has(id);
            num_spilled += usize::from(has_spill);
            assert!(
                state.num_spill_pages() == 0 || matches!(state.phase(), Phase::Leaving(_)),
                "request {id} has host memory set aside, and is not leaving"
            );
            assert!(
                !has_spill || matches!(state.phase(), Phase::Waiting | Phase::Receiving),
                "request {id} has KV in host memory, and its pages too"
            );
            assert!(
                !state.came_with_kv() || state.phase() != Phase::Waiting || has_spill,
                "request {id} came with KV and would be computed here"
            );
        }
        self.spills.check_invariants(
            self.config.max_spilled_pages,
            num_reserved_pages,
            num_spilled,
        );
    }

    /// The forecast counts exactly the requests that run or receive KV, with the numbers at the time of their count,
    /// and all pages that they hold. A request whose count is due has been counted anew.
    fn check_forecast(&self) {
        let running = self.running.iter();
        let holders = running.chain(self.remote_kv.iter());
        let counted = holders.map(|index| {
            let state = &self.requests[index];
            let id = state.id();
            let contribution = state.contribution();
            let contribution =
                contribution.unwrap_or_else(|| panic!("request {id} is not counted"));
            (contribution, state.tables().num_pages())
        });
        self.forecast.pages().check_invariants(counted);
        for state in self.requests.iter() {
            let id = state.id();
            let is_holder = matches!(
                state.phase(),
                Phase::Running | Phase::Receiving | Phase::Arrived
            );
            assert_eq!(
                is_holder,
                state.contribution().is_some(),
                "request {id} holds pages and is not counted, or is counted and holds none"
            );
            // Rows of accepted drafts are counted when the next step is planned.
            let is_planned = state.num_inflight_samples() > 0
                && state.last_sample_step().0 + 1 == self.inflight.next_step().0;
            let max_rows = state.contribution().map_or(0, |counted| counted.max_rows);
            assert!(
                !is_planned || !state.is_running() || state.num_rows() <= max_rows,
                "request {id} should have been counted anew"
            );
        }
    }
}
