//! Held pages of a prefill node, seen from outside: each hold has a lease, and its pages go soon after that.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::RequestId;

use crate::checker::{Verdict, ensure};

#[derive(Default)]
pub struct LeaseWatch {
    /// Until when the leases of holds run.
    leases: BTreeMap<RequestId, u64>,
    /// Holds whose lease is over, and when their pages must be let go.
    ended: BTreeMap<RequestId, u64>,
    released: BTreeSet<RequestId>,
}

impl LeaseWatch {
    /// Pages are held from now on, unless they were let go before this was told.
    pub fn held(&mut self, request: RequestId, until_us: u64) {
        if !self.released.contains(&request) {
            self.leases.insert(request, until_us);
        }
    }

    pub fn renewed(&mut self, request: RequestId, until_us: u64) {
        self.leases.insert(request, until_us);
    }

    /// A lease is over. Returns the time until which it was to run. The pages must be let go by `by_us`.
    pub fn ended(&mut self, request: RequestId, by_us: u64) -> Option<u64> {
        if !self.released.contains(&request) {
            self.ended.insert(request, by_us);
        }
        self.leases.remove(&request)
    }

    pub fn released(&mut self, request: RequestId) {
        self.leases.remove(&request);
        self.ended.remove(&request);
        self.released.insert(request);
    }

    /// Checks the holds when everything has been done that is due.
    pub fn check(&self, now_us: u64) -> Verdict {
        let mut leases = self.leases.iter();
        let endless = leases.find(|&(_, &until_us)| until_us <= now_us);
        ensure(endless.is_none(), || {
            format!("a lease goes on behind its end: {endless:?}")
        })?;
        let mut ended = self.ended.iter();
        let locked = ended.find(|&(_, &by_us)| by_us < now_us);
        ensure(locked.is_none(), || {
            format!("pages are held behind their lease, which had to go: {locked:?}")
        })
    }
}
