//! Blocks that other nodes load from this one, and blocks that this one fetches: questions and reports to the engine.

use std::sync::Arc;
use std::time::Duration;

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchMedium, FetchRefusal, FetchRequest, HeldBlocks,
    HoldId, HoldRefusal, Namespace, PageHash, Scheduler, TokenId,
};

use crate::kv_disk::Tier;
use crate::request::command::{Command, CommandSender};
use crate::state::shared::Shared;
use crate::wake::answer::{Answer, question};

/// Asks the engine for blocks, and reports on their transfers. A waiting method returns `None` when the engine has
/// stopped. If its future is dropped, the hold or fetch that it would have returned ends.
#[derive(Clone)]
pub struct BlockExchange {
    pub(crate) commands: CommandSender,
    pub(crate) shared: Arc<Shared>,
    /// `None` without a disk.
    pub(crate) disk: Option<Arc<Tier>>,
}

impl BlockExchange {
    pub fn page_size(&self) -> u32 {
        self.shared.limits().page_size
    }

    /// The hashes of the whole blocks of a sequence.
    pub fn hashes(&self, namespace: &Namespace, tokens: &[TokenId]) -> Arc<[PageHash]> {
        let limits = self.shared.limits();
        limits
            .block_hasher
            .hashes(namespace, tokens, limits.page_size)
            .collect()
    }

    /// Returns the whole blocks of a sequence. `hashes` begins with their hashes, and may also have hashes of later
    /// blocks.
    pub fn list(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        hashes: &[PageHash],
    ) -> BlockList {
        let page_size = self.page_size() as usize;
        let num_blocks = tokens.len() / page_size;
        BlockList {
            namespace: namespace.clone(),
            tokens: tokens[..num_blocks * page_size].to_vec(),
            hashes: hashes[..num_blocks].to_vec(),
        }
    }

    /// Returns the number of settled blocks at the beginning of a list: blocks that are complete and were computed by
    /// steps that have returned.
    pub async fn look_up(&self, list: BlockList) -> Option<u32> {
        self.ask(move |scheduler| scheduler.look_up_blocks(&list))
            .await
    }

    /// Returns the number of blocks of a list, from the first on, that a request can take from memory and disk, if
    /// memory has the first `num_here` blocks. Returns 0 without a disk.
    pub fn num_on_disk(&self, list: &BlockList, num_here: u32) -> u32 {
        match &self.disk {
            Some(disk) => disk.num_usable(list, num_here, self.shared.limits()),
            None => 0,
        }
    }

    /// Reads blocks of a list from the disk to memory, if reading is quicker than computing the blocks. Returns when no
    /// more blocks come.
    pub async fn bring_from_disk(&self, list: BlockList) {
        let (reply, ended) = question(drop);
        self.commands.send(Command::BringBlocks { list, reply });
        ended.await;
    }

    /// Returns the number of settled blocks at the beginning of a list, for a node that would load the blocks from
    /// `first_block` on.
    pub async fn look_up_lendable(&self, list: BlockList, first_block: u32) -> Option<u32> {
        self.ask(move |scheduler| scheduler.look_up_lendable(&list, first_block))
            .await
    }

    /// Holds the cached blocks of a list from `first_block` on for another node, or only some of these blocks,
    /// beginning with `first_block`. The held blocks stay unchanged for at most `lease`.
    pub async fn hold(
        &self,
        list: BlockList,
        first_block: u32,
        lease: Duration,
    ) -> Option<Result<HeldBlocks, HoldRefusal>> {
        let until_us = self.at_us(lease);
        let exchange = self.clone();
        let (reply, answer) = question(move |missed: Result<HeldBlocks, _>| {
            if let Ok(held) = missed {
                drop(exchange.ask_release(held.id));
            }
        });
        self.tell(move |scheduler, now_us| {
            let held = scheduler.hold_blocks(&list, first_block, until_us);
            // The caller has left, and has not read the pages yet.
            if let Err(Ok(held)) = reply.send(held) {
                scheduler.release_blocks(held.id, now_us);
            }
        });
        answer.await
    }

    /// Reports that all reads of a hold's blocks have ended. Returns whether the hold was live until this call.
    pub async fn release(&self, id: HoldId) -> Option<bool> {
        self.ask_release(id).await
    }

    fn ask_release(&self, id: HoldId) -> Answer<bool> {
        let (reply, answer) = question(drop);
        self.commands.send(Command::ReleaseBlocks { id, reply });
        answer
    }

    /// Reserves pages for the uncached blocks of a sequence. Requests wait for them until `soft` from now, and the
    /// fetch is cancelled `hard` from now.
    pub async fn begin_fetch(
        &self,
        medium: FetchMedium,
        namespace: Namespace,
        tokens: Vec<TokenId>,
        soft: Duration,
        hard: Duration,
    ) -> Option<Result<FetchGrant, FetchRefusal>> {
        let request = FetchRequest {
            medium,
            namespace,
            tokens,
            soft_us: self.at_us(soft),
            hard_us: self.at_us(hard),
        };
        let exchange = self.clone();
        let (reply, answer) = question(move |missed: Result<FetchGrant, _>| {
            if let Ok(grant) = missed {
                exchange.handle_fetch_ended(grant.id, FetchEnd::Lost);
            }
        });
        self.tell(move |scheduler, _| {
            // The caller has left, and has not written to the pages yet.
            if let Err(Ok(grant)) = reply.send(scheduler.begin_fetch(request)) {
                scheduler.handle_fetch_ended(grant.id, FetchEnd::Lost);
            }
        });
        answer.await
    }

    /// Shortens a fetch to its first `num_blocks` blocks, before any of its pages is written. Returns `Some(None)` if
    /// the fetch is cancelled. The caller ends the fetch after any answer.
    pub async fn shorten_fetch(&self, id: FetchId, num_blocks: u32) -> Option<Option<FetchGrant>> {
        self.ask(move |scheduler| scheduler.shorten_fetch(id, num_blocks))
            .await
    }

    /// Reports that the pages of the first `num_blocks` fetched blocks are filled.
    pub fn handle_fetched(&self, id: FetchId, num_blocks: u32) {
        self.tell(move |scheduler, _| {
            scheduler.handle_fetched(id, num_blocks);
        });
    }

    /// Reports that all writes to the pages of a fetch have ended.
    pub fn handle_fetch_ended(&self, id: FetchId, end: FetchEnd) {
        self.tell(move |scheduler, _| {
            scheduler.handle_fetch_ended(id, end);
        });
    }

    /// Reports that a path of the [copy offers](crate::Engine::subscribe_copy_offers) could not be copied, so that it is
    /// offered again.
    pub fn retract_copy_offer(&self, namespace: Namespace, tokens: Vec<TokenId>) {
        self.tell(move |scheduler, _| scheduler.retract_copy_offer(&namespace, &tokens));
    }

    /// Asks a question without side effects. Nothing has to be undone if the caller drops the future.
    fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Scheduler) -> T + Send + 'static,
    ) -> Answer<T> {
        let (reply, answer) = question(drop);
        self.tell(move |scheduler, _| {
            let _ = reply.send(call(scheduler));
        });
        answer
    }

    fn tell(&self, call: impl FnOnce(&mut Scheduler, u64) + Send + 'static) {
        self.commands.send(timed(call));
    }

    fn at_us(&self, from_now: Duration) -> u64 {
        let from_now_us = u64::try_from(from_now.as_micros()).unwrap_or(u64::MAX);
        self.shared.now_us().saturating_add(from_now_us)
    }
}

/// Updates the scheduler's clock before `call`: leases begin now, and the clock may still show the time of the last
/// step.
fn timed(call: impl FnOnce(&mut Scheduler, u64) + Send + 'static) -> Command {
    Command::scheduler(move |scheduler, now_us| {
        scheduler.note_time(now_us);
        call(scheduler, now_us);
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use corella_core::{BatchOutput, RequestId, Sample, SchedulerConfig};

    use super::*;
    use crate::engine_loop::block_feed::BlockFeed;
    use crate::request::submission::Submission;

    const LEASE_US: u64 = 1000;

    /// A scheduler that has computed a prompt of two blocks at the time 0, and has planned no step since.
    fn idle_scheduler() -> (Scheduler, BlockList) {
        let mut config = SchedulerConfig::new(64, 4, 64);
        config.hold_lease_us = LEASE_US;
        let (hasher, page_size) = (config.block_hasher, config.page_size);
        let mut scheduler = Scheduler::new(config).unwrap();
        let tokens: Vec<_> = (0..8).collect();
        let submission = Submission::new(tokens.clone(), 1);
        let request = submission.into_request(RequestId(0), 0);
        scheduler.add_requests(vec![request]).unwrap();
        let batch = scheduler.schedule(0).unwrap();
        let sample = Sample {
            token: 1,
            logprobs: None,
        };
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: vec![(batch.spans[0].slot, sample)],
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        let list = BlockList::new(Namespace::default(), tokens, &hasher, page_size);
        (scheduler, list)
    }

    /// Leases count from the command, not from the last plan before it.
    #[test]
    fn a_hold_after_an_idle_time_lives_as_long_as_its_lease() {
        const NOW_US: u64 = 1000 * LEASE_US;
        for (released_us, has_lived) in [(LEASE_US - 1, true), (LEASE_US, false)] {
            let (mut scheduler, list) = idle_scheduler();
            let (sender, held) = mpsc::channel();
            let hold = timed(move |scheduler, _| {
                let held = scheduler.hold_blocks(&list, 0, NOW_US + 10 * LEASE_US);
                sender.send(held).unwrap();
            });
            let Command::Scheduler(hold) = hold else {
                panic!("a hold is a call of the scheduler");
            };
            hold(&mut scheduler, NOW_US);
            let held = held.recv().unwrap().unwrap();
            assert_eq!(held.num_blocks, 2);
            assert_eq!(scheduler.poll_deadline(), Some(NOW_US + LEASE_US));
            let released =
                BlockFeed::default().release(held.id, &mut scheduler, NOW_US + released_us);
            assert_eq!(released, has_lived);
        }
    }
}
