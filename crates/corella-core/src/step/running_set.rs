//! Requests that hold a slot: those that run, by rank, and those that leave while steps in flight still name them.

use alloc::vec::Vec;

use crate::request_state::{RequestIndex, RequestTable};

#[derive(Debug, Default)]
pub(crate) struct RunningSet {
    /// Sorted by rank.
    by_rank: Vec<RequestIndex>,
    /// The part of them that still prefills, sorted by rank.
    prefilling: Vec<RequestIndex>,
    num_leaving: usize,
}

impl RunningSet {
    pub fn insert(&mut self, index: RequestIndex, requests: &RequestTable) {
        let state = &requests[index];
        let is_before = |&other: &RequestIndex| requests[other].rank < state.rank;
        let at = self.by_rank.partition_point(is_before);
        self.by_rank.insert(at, index);
        if state.is_prefilling() {
            let at = self.prefilling.partition_point(is_before);
            self.prefilling.insert(at, index);
        }
    }

    /// # Panics
    /// Panics when the request does not run.
    pub fn remove(&mut self, index: RequestIndex, requests: &RequestTable) {
        let rank = requests[index].rank;
        let at = self
            .by_rank
            .binary_search_by_key(&rank, |&other| requests[other].rank);
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

    /// The least urgent request, and of equals the one that came last.
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
}
