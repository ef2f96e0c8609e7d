//! The polls of a driver.
//!
//! After it has planned a step, processed a returned step, or passed on commands, a driver empties the queues in this
//! order:
//!
//! 1. [`poll_spill_task`](Scheduler::poll_spill_task): copies that begin early free pages early.
//! 2. [`poll_kv_fact`](Scheduler::poll_kv_fact): the fact about a request's KV comes before the request's end, so that
//!    a reader of both then knows which rows exist.
//! 3. [`poll_fetch_cancel`](Scheduler::poll_fetch_cancel) and [`poll_ended_hold`](Scheduler::poll_ended_hold): writers
//!    and readers that stop early free pages early.
//! 4. [`poll_output`](Scheduler::poll_output). Before it, the driver publishes [`stats`](Scheduler::stats), so that they
//!    already count a request as ended when its caller sees the end.
//! 5. [`poll_kv_event`](Scheduler::poll_kv_event): events describe the cache at the time of the poll, so a later poll
//!    returns fewer of them.
//!
//! Handling the polled items may fill the queues again. When all are empty and [`schedule`](Scheduler::schedule) plans
//! no step, the driver sleeps until [`poll_deadline`](Scheduler::poll_deadline) at the latest.

use crate::{FetchId, HoldId, KvEvent, KvFact, RequestOutput, Scheduler, SpillTask};

impl Scheduler {
    /// The next copy to be made between KV pages and host memory.
    pub fn poll_spill_task(&mut self) -> Option<SpillTask> {
        self.spills.pop_task()
    }

    /// The next fact about exported KV, in order. While too many facts are unread, requests that export KV wait.
    pub fn poll_kv_fact(&mut self) -> Option<KvFact> {
        self.holds.pop_fact()
    }

    /// Returns the next output, in the order of creation.
    pub fn poll_output(&mut self) -> Option<RequestOutput> {
        self.journal.pop()
    }

    /// The next fetch whose writer has to stop. Its pages stay reserved until
    /// [`handle_fetch_ended`](Self::handle_fetch_ended) reports the stop.
    pub fn poll_fetch_cancel(&mut self) -> Option<FetchId> {
        self.holds.fetches_mut().pop_cancelled()
    }

    /// The next hold of blocks that has ended, whose readers have to stop. Its pages stay unchanged until
    /// [`release_blocks`](Self::release_blocks) reports the stop.
    pub fn poll_ended_hold(&mut self) -> Option<HoldId> {
        self.holds.of_blocks_mut().pop_ended()
    }

    /// Starts a subscription to the content of the prefix cache: [`poll_kv_event`](Self::poll_kv_event) returns its
    /// events, beginning with the present content. `salt` seeds the page hashes.
    pub fn watch_kv(&mut self, salt: u64) {
        self.kv.watch(salt);
    }

    pub fn unwatch_kv(&mut self) {
        self.kv.unwatch();
    }

    /// Returns the next KV event, if any. Even a slow reader has no more pending events than its known blocks and the
    /// blocks in the tree.
    pub fn poll_kv_event(&mut self) -> Option<KvEvent> {
        self.kv.poll_event(self.inflight.last_returned())
    }

    /// The next deadline. The driver calls [`schedule`](Self::schedule) by then.
    pub fn poll_deadline(&self) -> Option<u64> {
        let remote_kv_us = self.remote_kv.next_deadline_us();
        let lease_us = self.holds.next_lease_us();
        let fetch_us = self.holds.fetches().next_deadline_us();
        let hold_us = self.holds.of_blocks().next_end_us();
        let retention_us = self.kv.next_retention_end_us();
        remote_kv_us
            .into_iter()
            .chain(lease_us)
            .chain(fetch_us)
            .chain(hold_us)
            .chain(retention_us)
            .min()
    }

    /// Whether a transfer, a copy or another node still has pages. When it gives them back, requests without pages may
    /// continue.
    pub fn waits_for_kv(&self) -> bool {
        self.remote_kv.num_receiving() > 0
            || !self.holds.is_empty()
            || !self.holds.fetches().is_empty()
            || !self.holds.of_blocks().is_empty()
            || self.spills.is_copying()
    }
}
