//! Offers of blocks to a lower tier.
//!
//! A driver with a tier calls [`offer_copies`](Scheduler::offer_copies), and then
//! [`poll_copy_offer`](Scheduler::poll_copy_offer) whenever it can copy. It holds the blocks that its tier lacks with
//! [`hold_blocks`](Scheduler::hold_blocks) while it copies them. When requests need the pages, the scheduler gives up
//! such a hold like a hold for another node, so that no request waits for a copy.

use alloc::vec::Vec;

use crate::{Namespace, Scheduler, TokenId};

impl Scheduler {
    /// Begins to note the blocks that are worth a copy.
    pub fn offer_copies(&mut self) {
        self.kv.begin_copy_offers();
    }

    /// The namespace and the tokens of the next path of blocks that is worth a copy: a request used it again, or it is
    /// next to be evicted.
    pub fn poll_copy_offer(&mut self) -> Option<(Namespace, Vec<TokenId>)> {
        self.kv.poll_copy_offer(self.inflight.last_returned())
    }

    /// Offers all blocks that no request uses, because the cache is about to end.
    pub fn offer_all_copies(&mut self) {
        self.kv.offer_all_copies();
    }

    /// Reports that blocks could not be copied, so that they may be offered again.
    pub fn retract_copy_offer(&mut self, namespace: &Namespace, tokens: &[TokenId]) {
        self.kv.retract_copy_offer(namespace, tokens);
    }
}
