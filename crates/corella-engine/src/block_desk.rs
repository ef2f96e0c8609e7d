//! The loop's side of loads and fetches of blocks.

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, HeldBlocks, HoldId,
    HoldRefusal, Scheduler,
};

use crate::answer::Reply;
use crate::block_exchange::BlockFact;
use crate::feed::{Feed, Subscriber};

/// What the loop is asked or told about blocks.
pub(crate) enum BlockCommand {
    LookUp {
        list: BlockList,
        reply: Reply<u32>,
    },
    Hold {
        list: BlockList,
        until_us: u64,
        reply: Reply<Result<HeldBlocks, HoldRefusal>>,
    },
    Release {
        id: HoldId,
        reply: Reply<bool>,
    },
    BeginFetch {
        request: FetchRequest,
        reply: Reply<Result<FetchGrant, FetchRefusal>>,
    },
    Fetched {
        id: FetchId,
        num_blocks: u32,
    },
    FetchEnded {
        id: FetchId,
        end: FetchEnd,
    },
}

/// Passes commands on to the scheduler, and facts to the driver of loads.
#[derive(Default)]
pub(crate) struct BlockDesk {
    facts: Feed<BlockFact>,
    /// Holds that the subscriber was told to have ended, and that are not released.
    ended: Vec<HoldId>,
}

impl BlockDesk {
    /// Passes a command on. A hold or a fetch whose asker has gone ends at once: nothing reads or writes its pages yet.
    pub fn carry_out(&mut self, command: BlockCommand, scheduler: &mut Scheduler, now_us: u64) {
        // The scheduler's clock may have stopped with the last step, and leases begin now.
        scheduler.note_time(now_us);
        match command {
            BlockCommand::LookUp { list, reply } => {
                let _ = reply.send(scheduler.look_up_blocks(&list));
            }
            BlockCommand::Hold {
                list,
                until_us,
                reply,
            } => {
                if let Err(Ok(held)) = reply.send(scheduler.hold_blocks(&list, until_us)) {
                    scheduler.release_blocks(held.id, now_us);
                }
            }
            BlockCommand::Release { id, reply } => {
                let has_lived = scheduler.release_blocks(id, now_us);
                self.ended.retain(|&other| other != id);
                let _ = reply.send(has_lived.unwrap_or(false));
            }
            BlockCommand::BeginFetch { request, reply } => {
                if let Err(Ok(grant)) = reply.send(scheduler.begin_fetch(request)) {
                    scheduler.handle_fetch_ended(grant.id, FetchEnd::Lost);
                }
            }
            BlockCommand::Fetched { id, num_blocks } => {
                scheduler.handle_fetched(id, num_blocks);
            }
            BlockCommand::FetchEnded { id, end } => {
                scheduler.handle_fetch_ended(id, end);
            }
        }
    }

    /// Replaces the earlier subscriber, if there is one. Holds of its loads end by their leases.
    pub fn subscribe(
        &mut self,
        subscriber: Subscriber<BlockFact>,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) {
        self.release_ended(scheduler, now_us);
        self.facts.subscribe(subscriber);
    }

    /// Hands over what there is and what there is room for.
    ///
    /// While there is no subscriber, pages are released when their hold ends. What a reader reads from then on counts for
    /// nothing: [`BlockExchange::release`](crate::BlockExchange::release) says that the hold has not lived. A cancelled
    /// fetch keeps its pages until its writer is at rest, because the writer may still write to them. Requests have not
    /// waited for it since its soft deadline, and its pages count against
    /// [`max_fetched_pages`](corella_core::SchedulerConfig::max_fetched_pages) until then. So a writer that does not read
    /// facts has to stop at the hard deadline by itself.
    pub fn forward(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        let ended = &mut self.ended;
        self.facts.forward(|| {
            if let Some(id) = scheduler.poll_ended_hold() {
                ended.push(id);
                return Some(BlockFact::HoldEnded(id));
            }
            let cancelled = scheduler.poll_fetch_cancel();
            cancelled.map(BlockFact::FetchCancelled)
        });
        if self.facts.has_subscriber() {
            return;
        }
        self.release_ended(scheduler, now_us);
        while let Some(id) = scheduler.poll_ended_hold() {
            scheduler.release_blocks(id, now_us);
        }
        while scheduler.poll_fetch_cancel().is_some() {}
    }

    fn release_ended(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        for id in self.ended.drain(..) {
            scheduler.release_blocks(id, now_us);
        }
    }
}
