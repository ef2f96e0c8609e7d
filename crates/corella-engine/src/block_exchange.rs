//! Blocks that other nodes load from this one, and blocks that this one fetches: the questions to the engine, and its
//! facts.

use std::sync::Arc;
use std::time::Duration;

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, HeldBlocks, HoldId,
    HoldRefusal, Namespace, PageHash, TokenId,
};

use crate::answer::{Answer, Reply, question};
use crate::block_command::BlockCommand;
use crate::command::Command;
use crate::doorbell::CommandSender;
use crate::engine::Shared;
use crate::feed::FeedReader;

/// Asks the engine for blocks, and reports on their transfers. A waiting method returns `None` when the engine has
/// stopped. If its future is dropped, the hold or fetch that it would have returned ends.
#[derive(Clone)]
pub struct BlockExchange {
    pub(crate) commands: CommandSender,
    pub(crate) shared: Arc<Shared>,
}

/// A transfer that the driver of loads has to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFact {
    /// No new read of the blocks may begin. [`BlockExchange::release`] reports that all reads have ended.
    HoldEnded(HoldId),
    /// No new write to the pages may begin. [`BlockExchange::handle_fetch_ended`] reports that all writes have ended.
    FetchCancelled(FetchId),
}

/// The scheduler's block facts.
pub struct BlockFacts(pub(crate) FeedReader<BlockFact>);

impl BlockFacts {
    /// Blocks until the next fact. `None` when the engine has stopped, or a newer subscriber has replaced this one.
    pub fn next_blocking(&self) -> Option<BlockFact> {
        self.0.next_blocking()
    }

    /// `None` without a pending fact.
    pub fn try_next(&self) -> Option<BlockFact> {
        self.0.try_next()
    }
}

/// Both ends of a question that may be refused.
type Asked<T, E> = (Reply<Result<T, E>>, Answer<Result<T, E>>);

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

    /// The whole blocks of a sequence, given their hashes or more of them.
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

    /// The number of settled blocks at the beginning of a list.
    pub async fn look_up(&self, list: BlockList) -> Option<u32> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::LookUp { list, reply });
        answer.await
    }

    /// The number of settled blocks for a node that has the blocks before `first_block` and borrows the others.
    pub async fn look_up_lendable(&self, list: BlockList, first_block: u32) -> Option<u32> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::LookUpLendable {
            list,
            first_block,
            reply,
        });
        answer.await
    }

    /// Lends the blocks from `first_block` on of the longest local prefix of a list, or the first of them, and keeps
    /// them unchanged until `lease` from now at the latest.
    pub async fn hold(
        &self,
        list: BlockList,
        first_block: u32,
        lease: Duration,
    ) -> Option<Result<HeldBlocks, HoldRefusal>> {
        let until_us = self.at_us(lease);
        let (reply, answer) = self.ask(|held: HeldBlocks| {
            let (reply, _) = question(drop);
            BlockCommand::Release { id: held.id, reply }
        });
        self.tell(BlockCommand::Hold {
            list,
            first_block,
            until_us,
            reply,
        });
        answer.await
    }

    /// Reports that all reads of a hold's blocks have ended. Returns whether the hold was live until now.
    pub async fn release(&self, id: HoldId) -> Option<bool> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::Release { id, reply });
        answer.await
    }

    /// Reserves pages for the uncached blocks of a sequence. Requests wait for them until `soft` from now, and the
    /// fetch is cancelled `hard` from now.
    pub async fn begin_fetch(
        &self,
        namespace: Namespace,
        tokens: Vec<TokenId>,
        soft: Duration,
        hard: Duration,
    ) -> Option<Result<FetchGrant, FetchRefusal>> {
        let request = FetchRequest {
            namespace,
            tokens,
            soft_us: self.at_us(soft),
            hard_us: self.at_us(hard),
        };
        let (reply, answer) = self.ask(|grant: FetchGrant| BlockCommand::FetchEnded {
            id: grant.id,
            end: FetchEnd::Lost,
        });
        self.tell(BlockCommand::BeginFetch { request, reply });
        answer.await
    }

    /// Cuts a fetch without written pages off behind the first `num_blocks` blocks. `Some(None)` if it is cancelled.
    /// The asker ends the fetch after any answer.
    pub async fn shorten_fetch(&self, id: FetchId, num_blocks: u32) -> Option<Option<FetchGrant>> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::ShortenFetch {
            id,
            num_blocks,
            reply,
        });
        answer.await
    }

    /// Reports that the pages of the first `num_blocks` fetched blocks are filled.
    pub fn handle_fetched(&self, id: FetchId, num_blocks: u32) {
        self.tell(BlockCommand::Fetched { id, num_blocks });
    }

    /// Reports that all writes to the pages of a fetch have ended.
    pub fn handle_fetch_ended(&self, id: FetchId, end: FetchEnd) {
        self.tell(BlockCommand::FetchEnded { id, end });
    }

    /// Asks a question. A command takes back an answer that comes too late.
    fn ask<T: 'static, E: 'static>(
        &self,
        undo: impl FnOnce(T) -> BlockCommand + Send + 'static,
    ) -> Asked<T, E> {
        let exchange = self.clone();
        question(move |answer| {
            if let Ok(answer) = answer {
                exchange.tell(undo(answer));
            }
        })
    }

    fn tell(&self, command: BlockCommand) {
        self.commands.send(Command::Block(command));
    }

    fn at_us(&self, from_now: Duration) -> u64 {
        let from_now_us = u64::try_from(from_now.as_micros()).unwrap_or(u64::MAX);
        self.shared.now_us().saturating_add(from_now_us)
    }
}
