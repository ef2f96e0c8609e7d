//! The check of a prefill node's holds: each has a lease, and its pages are released soon after the lease's end.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::RequestId;

use crate::check::verdict::{Verdict, ensure};

#[derive(Default)]
pub struct LeaseWatch {
    /// The end of each hold's lease.
    leases: BTreeMap<RequestId, u64>,
    /// Holds whose lease has ended, each with the latest time of its release.
    ended: BTreeMap<RequestId, u64>,
    released: BTreeSet<RequestId>,
}

impl LeaseWatch {
    /// Notes that a request's pages are held until `until_us`, unless they were released before this report.
    pub fn held(&mut self, request: RequestId, until_us: u64) {
        if !self.released.contains(&request) {
            self.leases.insert(request, until_us);
        }
    }

    pub fn renewed(&mut self, request: RequestId, until_us: u64) {
        self.leases.insert(request, until_us);
    }

    /// Notes the end of a lease, and returns its planned end. The pages must be released by `by_us`.
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

    /// Checks the holds, when all due work is done.
    pub fn check(&self, now_us: u64) -> Verdict {
        let mut leases = self.leases.iter();
        let endless = leases.find(|&(_, &until_us)| until_us <= now_us);
        ensure(endless.is_none(), || {
            format!("a lease continues after its end: {endless:?}")
        })?;
        let mut ended = self.ended.iter();
        let locked = ended.find(|&(_, &by_us)| by_us < now_us);
        ensure(locked.is_none(), || {
            format!("pages are still held after the end of their lease: {locked:?}")
        })
    }
}
