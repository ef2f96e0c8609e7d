//! The index of a live request in the table, and sets of indices.

use alloc::vec::Vec;

/// The index of a live request in the `RequestTable`. It does not change while a step or a reservation
/// in flight names the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestIndex(pub(super) u32);

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
