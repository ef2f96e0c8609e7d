//! The loop's reports of holds and fetches that others have to end, and of blocks that others may copy.

use std::iter;

use corella_core::{FetchId, HoldId, Namespace, Scheduler, TokenId};

use crate::kv_disk::KvDisk;
use crate::request::block_fact::BlockFact;
use crate::wake::feed::{Feed, Subscriber};

/// Passes facts to the driver of fetches.
#[derive(Default)]
pub(crate) struct BlockFeed {
    facts: Feed<BlockFact>,
    /// Holds whose end was reported to the subscriber, and which the subscriber has not released yet.
    ended: Vec<HoldId>,
    /// The namespaces and the tokens of paths that are worth a copy.
    offers: Feed<(Namespace, Vec<TokenId>)>,
}

impl BlockFeed {
    /// Releases a hold whose reads have ended. Returns whether the hold was live until now.
    pub fn release(&mut self, id: HoldId, scheduler: &mut Scheduler, now_us: u64) -> bool {
        scheduler.note_time(now_us);
        self.ended.retain(|&other| other != id);
        scheduler.release_blocks(id, now_us).unwrap_or(false)
    }

    /// Replaces the earlier subscriber, if any. Holds for the earlier subscriber's loads end by their leases.
    pub fn subscribe(
        &mut self,
        subscriber: Subscriber<BlockFact>,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) {
        self.release_ended(scheduler, now_us);
        self.facts.subscribe(subscriber);
    }

    /// Replaces the earlier subscriber to paths that are worth a copy, if any.
    pub fn subscribe_offers(&mut self, subscriber: Subscriber<(Namespace, Vec<TokenId>)>) {
        self.offers.subscribe(subscriber);
    }

    /// Passes pending facts to the subscriber until the channel is full.
    ///
    /// Without a subscriber, pages are released when their hold ends. Later reads are void:
    /// [`BlockExchange::release`](crate::BlockExchange::release) reports that the hold had ended. A cancelled fetch
    /// keeps its pages until its writer has stopped, because the writer may still write to them. Requests stop waiting
    /// for a fetch at its soft deadline. Its pages count against
    /// [`max_fetched_pages`](corella_core::SchedulerConfig::max_fetched_pages) until its writer has stopped, so a
    /// writer that does not read facts has to watch the hard deadline.
    ///
    /// The disk ends its own holds and fetches.
    pub fn forward(&mut self, scheduler: &mut Scheduler, disk: Option<&KvDisk>, now_us: u64) {
        self.offers.forward(|| scheduler.poll_copy_offer());
        let ended = &mut self.ended;
        self.facts.forward(|| {
            if let Some(id) = next_ended_hold(scheduler, disk) {
                ended.push(id);
                return Some(BlockFact::HoldEnded(id));
            }
            let cancelled = next_cancelled_fetch(scheduler, disk);
            cancelled.map(BlockFact::FetchCancelled)
        });
        if self.facts.has_subscriber() {
            return;
        }
        self.release_ended(scheduler, now_us);
        while let Some(id) = next_ended_hold(scheduler, disk) {
            scheduler.release_blocks(id, now_us);
        }
        while next_cancelled_fetch(scheduler, disk).is_some() {}
    }

    fn release_ended(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        for id in self.ended.drain(..) {
            scheduler.release_blocks(id, now_us);
        }
    }
}

fn next_ended_hold(scheduler: &mut Scheduler, disk: Option<&KvDisk>) -> Option<HoldId> {
    let is_other = |id: &HoldId| !disk.is_some_and(|disk| disk.has_hold(*id));
    iter::from_fn(|| scheduler.poll_ended_hold()).find(is_other)
}

fn next_cancelled_fetch(scheduler: &mut Scheduler, disk: Option<&KvDisk>) -> Option<FetchId> {
    let is_other = |id: &FetchId| !disk.is_some_and(|disk| disk.handle_fetch_cancelled(*id));
    iter::from_fn(|| scheduler.poll_fetch_cancel()).find(is_other)
}
