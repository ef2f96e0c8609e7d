//! Requests that have pages and no slot: another node or host memory fills their pages, or has filled them.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::request_state::{Phase, RequestIndex, RequestState, RequestTable};

/// The deadline of requests whose KV comes from host memory. These requests need no deadline, because no other node can
/// fail to send the KV.
pub(crate) const NO_DEADLINE: u64 = u64::MAX;

/// Requests that have pages and no slot.
#[derive(Debug, Default)]
pub(crate) struct WaitingForRemoteKv {
    /// Requests whose KV has not arrived.
    by_deadline: BTreeSet<(u64, RequestIndex)>,
    /// Requests whose KV has arrived, by rank.
    arrived: Vec<RequestIndex>,
}

impl WaitingForRemoteKv {
    pub fn len(&self) -> usize {
        self.by_deadline.len() + self.arrived.len()
    }

    pub fn num_receiving(&self) -> usize {
        self.by_deadline.len()
    }

    pub fn begin(&mut self, index: RequestIndex, state: &mut RequestState, deadline_us: u64) {
        state.receive_until(deadline_us);
        self.by_deadline.insert((deadline_us, index));
    }

    /// Removes a request that no longer receives KV.
    pub fn end(&mut self, index: RequestIndex, state: &RequestState) {
        self.by_deadline
            .remove(&(state.remote_kv_deadline_us(), index));
    }

    /// Records that a receiving request has its KV. It waits for a slot, to compute the tokens after the first
    /// `num_computed_tokens`.
    pub fn arrive(
        &mut self,
        index: RequestIndex,
        num_computed_tokens: u32,
        requests: &mut RequestTable,
    ) {
        let state = &mut requests[index];
        self.end(index, state);
        state.begin_at(num_computed_tokens);
        state.enter(Phase::Arrived);
        let rank = state.rank();
        let is_before = |&other: &RequestIndex| requests[other].rank() < rank;
        let at = self.arrived.partition_point(is_before);
        self.arrived.insert(at, index);
    }

    pub fn remove_arrived(&mut self, index: RequestIndex) {
        self.arrived.retain(|&other| other != index);
    }

    pub fn first_arrived(&self) -> Option<RequestIndex> {
        self.arrived.first().copied()
    }

    /// A receiving request whose deadline has passed.
    pub fn first_late(&self, now_us: u64) -> Option<RequestIndex> {
        let &(deadline_us, index) = self.by_deadline.first()?;
        (deadline_us <= now_us).then_some(index)
    }

    pub fn next_deadline_us(&self) -> Option<u64> {
        let first = self.by_deadline.first();
        let first = first.map(|&(deadline_us, _)| deadline_us);
        first.filter(|&deadline_us| deadline_us != NO_DEADLINE)
    }

    /// All requests with pages and without a slot, arrived ones first.
    pub fn iter(&self) -> impl Iterator<Item = RequestIndex> {
        let receiving = self.by_deadline.iter().map(|&(_, index)| index);
        self.arrived.iter().copied().chain(receiving)
    }

    pub fn last_arrived(&self) -> Option<RequestIndex> {
        self.arrived.last().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_state::Rank;
    use crate::{Request, RequestId, SchedulerConfig};

    #[test]
    fn what_has_arrived_is_in_order_of_rank_and_never_late() {
        let mut requests = RequestTable::default();
        let mut waiting = WaitingForRemoteKv::default();
        let config = SchedulerConfig::new(64, 4, 256);
        let deadlines = [30, 10, NO_DEADLINE];
        let indices = [2, 1, 0].map(|arrival| {
            let request = Request::greedy(RequestId(arrival), alloc::vec![1, 2, 3], 8);
            let rank = Rank {
                arrival,
                ..Rank::FIRST
            };
            requests.insert(RequestState::new(request, rank, 8, &config))
        });
        for (index, deadline_us) in indices.into_iter().zip(deadlines) {
            waiting.begin(index, &mut requests[index], deadline_us);
        }
        assert_eq!(waiting.next_deadline_us(), Some(10));
        assert_eq!(waiting.first_late(9), None);
        assert_eq!(waiting.first_late(10), Some(indices[1]));
        waiting.arrive(indices[0], 3, &mut requests);
        waiting.arrive(indices[1], 3, &mut requests);
        assert_eq!((waiting.len(), waiting.num_receiving()), (3, 1));
        assert_eq!(waiting.first_arrived(), Some(indices[1]));
        assert_eq!(waiting.last_arrived(), Some(indices[0]));
        // Host memory has no deadline.
        assert_eq!(waiting.next_deadline_us(), None);
    }
}
