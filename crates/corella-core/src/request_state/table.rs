//! All live requests.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use crate::RequestId;
use crate::request_state::RequestState;

/// The index of a live request in the `RequestTable`. It does not change while a step or a reservation
/// in flight names the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestIndex(u32);

impl RequestIndex {
    pub const FIRST: Self = Self(0);
    pub const LAST: Self = Self(u32::MAX);
}

/// A set of requests.
#[derive(Debug, Default)]
pub(crate) struct RequestSet {
    /// Indexed by request, up to the largest inserted index.
    is_in: Vec<bool>,
}

impl RequestSet {
    pub fn insert(&mut self, index: RequestIndex) {
        let at = index.0 as usize;
        if self.is_in.len() <= at {
            self.is_in.resize(at + 1, false);
        }
        self.is_in[at] = true;
    }

    pub fn contains(&self, index: RequestIndex) -> bool {
        self.is_in.get(index.0 as usize) == Some(&true)
    }
}

impl FromIterator<RequestIndex> for RequestSet {
    fn from_iter<I: IntoIterator<Item = RequestIndex>>(indices: I) -> Self {
        let mut set = Self::default();
        for index in indices {
            set.insert(index);
        }
        set
    }
}

/// All live requests.
#[derive(Debug, Default)]
pub(crate) struct RequestTable {
    entries: Vec<Option<RequestState>>,
    unused: Vec<RequestIndex>,
    /// All of them by id.
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
