//! Commands about cached blocks, which the loop carries out.

use std::iter;

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, HeldBlocks, HoldId,
    HoldRefusal, Scheduler,
};

use crate::answer::Reply;
use crate::block_exchange::BlockFact;
use crate::feed::{Feed, Subscriber};
use crate::kv_disk::KvDisk;

/// A question or a report about blocks.
pub(crate) enum BlockCommand {
    LookUp {
        list: BlockList,
        reply: Reply<u32>,
    },
    LookUpLendable {
        list: BlockList,
        first_block: u32,
        reply: Reply<u32>,
    },
    Hold {
        list: BlockList,
        first_block: u32,
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
    ShortenFetch {
        id: FetchId,
        num_blocks: u32,
        reply: Reply<Option<FetchGrant>>,
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

/// Passes commands on to the scheduler, and facts to the driver of fetches.
#[derive(Default)]
pub(crate) struct BlockCommands {
    facts: Feed<BlockFact>,
    /// Holds whose end was reported to the subscriber, and that are not released.
    ended: Vec<HoldId>,
}

impl BlockCommands {
    /// Passes a command on. A hold or a fetch whose caller has gone ends at once: its pages are not read or written yet.
    pub fn carry_out(&mut self, command: BlockCommand, scheduler: &mut Scheduler, now_us: u64) {
        // The scheduler's clock may have stopped with the last step, and leases begin now.
        scheduler.note_time(now_us);
        match command {
            BlockCommand::LookUp { list, reply } => {
                let _ = reply.send(scheduler.look_up_blocks(&list));
            }
            BlockCommand::LookUpLendable {
                list,
                first_block,
                reply,
            } => {
                let _ = reply.send(scheduler.look_up_lendable(&list, first_block));
            }
            BlockCommand::Hold {
                list,
                first_block,
                until_us,
                reply,
            } => {
                let held = scheduler.hold_blocks(&list, first_block, until_us);
                if let Err(Ok(held)) = reply.send(held) {
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
            BlockCommand::ShortenFetch {
                id,
                num_blocks,
                reply,
            } => {
                // The asker ends the fetch after any answer.
                let _ = reply.send(scheduler.shorten_fetch(id, num_blocks));
            }
            BlockCommand::Fetched { id, num_blocks } => {
                scheduler.handle_fetched(id, num_blocks);
            }
            BlockCommand::FetchEnded { id, end } => {
                scheduler.handle_fetch_ended(id, end);
            }
        }
    }

    /// Replaces the earlier subscriber, if any. Holds of its loads end by their leases.
    pub fn subscribe(
        &mut self,
        subscriber: Subscriber<BlockFact>,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) {
        self.release_ended(scheduler, now_us);
        self.facts.subscribe(subscriber);
    }

    /// Passes pending facts to the subscriber, within its room.
    ///
    /// Without a subscriber, pages are released when their hold ends. Later reads are void:
    /// [`BlockExchange::release`](crate::BlockExchange::release) reports that the hold had ended. A cancelled fetch
    /// keeps its pages until its writer has stopped, because the writer may still write to them. Requests have not
    /// waited for it since its soft deadline, and its pages count against
    /// [`max_fetched_pages`](corella_core::SchedulerConfig::max_fetched_pages) until then. So a writer that does not
    /// read facts has to watch the hard deadline.
    ///
    /// The disk ends its own holds and fetches.
    pub fn forward(&mut self, scheduler: &mut Scheduler, disk: Option<&KvDisk>, now_us: u64) {
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

#[cfg(test)]
mod tests {
    use corella_core::{
        BatchOutput, Namespace, RequestId, Sample, SamplingParams, SchedulerConfig,
        StoppingCriteria,
    };

    use super::*;
    use crate::answer::{Answer, question};
    use crate::submission::Submission;

    const LEASE_US: u64 = 1000;

    /// A scheduler that has computed a prompt of two blocks at the time 0, and has planned no step since.
    fn idle_scheduler() -> (Scheduler, BlockList) {
        let mut config = SchedulerConfig::new(64, 4, 64);
        config.hold_lease_us = LEASE_US;
        let (hasher, page_size) = (config.block_hasher, config.page_size);
        let mut scheduler = Scheduler::new(config).unwrap();
        let tokens: Vec<_> = (0..8).collect();
        let submission = Submission {
            prompt: tokens.clone(),
            output: Vec::new(),
            exports_kv: false,
            sampling: SamplingParams::GREEDY,
            num_choices: 1,
            stopping: StoppingCriteria {
                max_tokens: Some(1),
                ..StoppingCriteria::default()
            },
            priority: 0,
            objectives: Default::default(),
            namespace: Namespace::default(),
            constraint: None,
            adapter: None,
            trace_id: None,
            trace: None,
        };
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

    fn taken<T>(answer: &mut Answer<T>) -> Option<T> {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(answer).poll(&mut cx) {
            std::task::Poll::Ready(answer) => answer,
            std::task::Poll::Pending => panic!("the command has not been answered"),
        }
    }

    /// Leases count from the command, not from the last plan before it.
    #[test]
    fn a_hold_after_an_idle_time_lives_as_long_as_its_lease() {
        const NOW_US: u64 = 1000 * LEASE_US;
        for (released_us, has_lived) in [(LEASE_US - 1, true), (LEASE_US, false)] {
            let (mut scheduler, list) = idle_scheduler();
            let mut commands = BlockCommands::default();
            let (reply, mut answer) = question(drop);
            let until_us = NOW_US + 10 * LEASE_US;
            let hold = BlockCommand::Hold {
                list,
                first_block: 0,
                until_us,
                reply,
            };
            commands.carry_out(hold, &mut scheduler, NOW_US);
            let held = taken(&mut answer).unwrap().unwrap();
            assert_eq!(held.num_blocks, 2);
            assert_eq!(scheduler.poll_deadline(), Some(NOW_US + LEASE_US));
            let (reply, mut answer) = question(drop);
            let id = held.id;
            let release = BlockCommand::Release { id, reply };
            commands.carry_out(release, &mut scheduler, NOW_US + released_us);
            assert_eq!(taken(&mut answer), Some(has_lived));
        }
    }
}
