//! All live requests.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use crate::RequestId;
use crate::request_state::{RequestIndex, RequestState};

#[derive(Debug, Default)]
pub(crate) struct RequestTable {
    entries: Vec<Option<RequestState>>,
    unused: Vec<RequestIndex>,
    /// All requests by id.
    by_id: BTreeMap<RequestId, RequestIndex>,
    num_inserted: u64,
}

impl RequestTable {
    pub fn insert(&mut self, state: RequestState) -> RequestIndex {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            RequestIndex(self.entries.len() as u32 - 1)
        });
        self.by_id.insert(state.id(), index);
        self.num_inserted += 1;
        self.entries[index.0 as usize] = Some(state);
        index
    }

    /// # Panics
    /// Panics when the request was removed before.
    pub fn remove(&mut self, index: RequestIndex) {
        self.unused.push(index);
        let state = self.entries[index.0 as usize].take();
        let state = state.expect("a request is removed from the table twice");
        self.by_id.remove(&state.id());
    }

    pub fn find(&self, id: RequestId) -> Option<RequestIndex> {
        self.by_id.get(&id).copied()
    }

    /// All requests in the order of their ids.
    pub fn indices(&self) -> impl Iterator<Item = RequestIndex> {
        self.by_id.values().copied()
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The number of requests that were ever inserted.
    pub fn num_inserted(&self) -> u64 {
        self.num_inserted
    }

    pub fn get(&self, index: RequestIndex) -> Option<&RequestState> {
        self.entries[index.0 as usize].as_ref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.entries.iter().flatten()
    }
}

impl Index<RequestIndex> for RequestTable {
    type Output = RequestState;

    fn index(&self, index: RequestIndex) -> &RequestState {
        self.entries[index.0 as usize]
            .as_ref()
            .expect("an index names a request that has been removed")
    }
}

impl IndexMut<RequestIndex> for RequestTable {
    fn index_mut(&mut self, index: RequestIndex) -> &mut RequestState {
        self.entries[index.0 as usize]
            .as_mut()
            .expect("an index names a request that has been removed")
    }
}
