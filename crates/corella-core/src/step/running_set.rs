//! Requests that hold a slot: running requests, by rank, and leaving requests, which steps in flight still name. A slot
//! is a request's place in the executor.

use alloc::vec::Vec;

use crate::SlotId;
use crate::request_state::{Phase, RequestIndex, RequestState, RequestTable};

#[derive(Debug, Default)]
pub(crate) struct RunningSet {
    /// Sorted by rank.
    by_rank: Vec<RequestIndex>,
    /// The requests of `by_rank` that still prefill, sorted by rank.
    prefilling: Vec<RequestIndex>,
    num_leaving: usize,
    free_slots: Vec<SlotId>,
    /// Free slots whose release no batch has announced yet.
    released_slots: Vec<SlotId>,
}

impl RunningSet {
    pub fn new(num_slots: u32) -> Self {
        Self {
            free_slots: (0..num_slots).rev().map(SlotId).collect(),
            ..Self::default()
        }
    }

    pub fn num_free_slots(&self) -> usize {
        self.free_slots.len()
    }

    /// # Panics
    /// Panics when no slot is free.
    pub fn take_slot(&mut self) -> SlotId {
        self.free_slots
            .pop()
            .expect("a request starts without a slot")
    }

    pub fn give_back_slot(&mut self, slot: SlotId) {
        self.released_slots.push(slot);
        self.free_slots.push(slot);
    }

    /// The slots that were given back since the last call, for the next batch.
    pub fn take_released_slots(&mut self) -> Vec<SlotId> {
        core::mem::take(&mut self.released_slots)
    }

    pub fn insert(&mut self, index: RequestIndex, requests: &RequestTable) {
        let state = &requests[index];
        let is_before = |&other: &RequestIndex| requests[other].rank() < state.rank();
        let at = self.by_rank.partition_point(is_before);
        self.by_rank.insert(at, index);
        if state.is_prefilling() {
            let at = self.prefilling.partition_point(is_before);
            self.prefilling.insert(at, index);
        }
    }

    /// Restores the order after ranks have changed.
    pub fn sort(&mut self, requests: &RequestTable) {
        let rank = |&index: &RequestIndex| requests[index].rank();
        self.by_rank.sort_unstable_by_key(rank);
        self.prefilling.sort_unstable_by_key(rank);
    }

    /// # Panics
    /// Panics when the request does not run.
    pub fn remove(&mut self, index: RequestIndex, requests: &RequestTable) {
        let rank = requests[index].rank();
        let at = self
            .by_rank
            .binary_search_by_key(&rank, |&other| requests[other].rank());
        self.by_rank
            .remove(at.expect("a running request is missing from the running set"));
        self.end_prefill(index);
    }

    pub fn end_prefill(&mut self, index: RequestIndex) {
        self.prefilling.retain(|&other| other != index);
    }

    pub fn len(&self) -> usize {
        self.by_rank.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// The least urgent request, and among equals the latest.
    pub fn last(&self) -> Option<RequestIndex> {
        self.by_rank.last().copied()
    }

    pub fn as_slice(&self) -> &[RequestIndex] {
        &self.by_rank
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = RequestIndex> {
        self.by_rank.iter().copied()
    }

    pub fn prefilling(&self) -> &[RequestIndex] {
        &self.prefilling
    }

    /// Requests that hold slots or pages until the steps in flight that name them have returned.
    pub fn num_leaving(&self) -> usize {
        self.num_leaving
    }

    pub fn note_leaving(&mut self) {
        self.num_leaving += 1;
    }

    pub fn note_left(&mut self) {
        self.num_leaving -= 1;
    }

    /// # Panics
    /// Panics when the lists or counts differ from the requests.
    pub fn check_invariants(&self, requests: &RequestTable, num_slots: u32) {
        let ranks = self.iter().map(|index| requests[index].rank());
        assert!(ranks.is_sorted(), "the running set is not sorted by rank");
        let prefilling = self.iter().filter(|&index| requests[index].is_prefilling());
        assert!(
            prefilling.eq(self.prefilling.iter().copied()),
            "the list of prefilling requests is wrong"
        );
        let is_leaving = |state: &&RequestState| matches!(state.phase(), Phase::Leaving(_));
        assert_eq!(
            requests.iter().filter(is_leaving).count(),
            self.num_leaving,
            "the number of leaving requests is wrong"
        );
        let has_slot = |state: &&RequestState| state.slot().is_some();
        assert_eq!(
            requests.iter().filter(has_slot).count() + self.num_free_slots(),
            num_slots as usize,
            "a slot is lost or held twice"
        );
    }
}
