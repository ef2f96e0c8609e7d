//! Blocks that other nodes load from this one, and blocks that this one fetches: what the engine is asked, and what it
//! tells.

use std::sync::Arc;
use std::time::Duration;

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, HeldBlocks, HoldId,
    HoldRefusal, Namespace, TokenId,
};

use crate::answer::{Answer, Reply, question};
use crate::block_desk::BlockCommand;
use crate::command::Command;
use crate::doorbell::CommandSender;
use crate::engine::Shared;
use crate::feed::FeedReader;

/// Asks the engine for blocks, and says what has become of them. A method that waits returns `None` when the engine has
/// stopped. When its future is dropped, a hold or a fetch that it would have returned ends.
#[derive(Clone)]
pub struct BlockExchange {
    pub(crate) commands: CommandSender,
    pub(crate) shared: Arc<Shared>,
}

/// What the driver of loads has to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFact {
    /// Nothing may read the blocks any more. [`BlockExchange::release`] says that nothing does.
    HoldEnded(HoldId),
    /// Nothing may begin to write to the pages any more. [`BlockExchange::handle_fetch_ended`] says that nothing does.
    FetchCancelled(FetchId),
}

/// The scheduler's block facts.
pub struct BlockFacts(pub(crate) FeedReader<BlockFact>);

impl BlockFacts {
    /// Blocks until there is a fact. `None` when the engine has stopped, or there is a newer
    /// subscriber.
    pub fn next_blocking(&self) -> Option<BlockFact> {
        self.0.next_blocking()
    }

    /// `None` when there is nothing now.
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

    /// The whole blocks of a sequence, with their hashes.
    pub fn list(&self, namespace: &Namespace, tokens: &[TokenId]) -> BlockList {
        let limits = self.shared.limits();
        let num_whole = tokens.len() - tokens.len() % limits.page_size as usize;
        let tokens = tokens[..num_whole].to_vec();
        let hasher = &limits.block_hasher;
        BlockList::new(namespace.clone(), tokens, hasher, limits.page_size)
    }

    /// How many blocks from the beginning of a list are settled here.
    pub async fn look_up(&self, list: BlockList) -> Option<u32> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::LookUp { list, reply });
        answer.await
    }

    /// How many of them there are for a node that has those before `first_block` and borrows the others from here.
    pub async fn look_up_lendable(&self, list: BlockList, first_block: u32) -> Option<u32> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::LookUpLendable {
            list,
            first_block,
            reply,
        });
        answer.await
    }

    /// Lends the blocks from `first_block` on of the longest prefix of a list that is here, or the first of them, and keeps
    /// them as they are until `lease` from now at the latest.
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

    /// Nothing reads the blocks of a hold any more. Whether the hold was live until now.
    pub async fn release(&self, id: HoldId) -> Option<bool> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::Release { id, reply });
        answer.await
    }

    /// Reserves pages for the blocks of a sequence that are not cached. Requests wait for them until `soft` from now, and
    /// the fetch is cancelled `hard` from now.
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

    /// Has a fetch into whose pages nothing was written end behind the first `num_blocks` blocks. `Some(None)` if it is
    /// cancelled. The asker ends the fetch, whatever the answer is.
    pub async fn shorten_fetch(&self, id: FetchId, num_blocks: u32) -> Option<Option<FetchGrant>> {
        let (reply, answer) = question(drop);
        self.tell(BlockCommand::ShortenFetch {
            id,
            num_blocks,
            reply,
        });
        answer.await
    }

    /// The pages of the first `num_blocks` fetched blocks are filled.
    pub fn handle_fetched(&self, id: FetchId, num_blocks: u32) {
        self.tell(BlockCommand::Fetched { id, num_blocks });
    }

    /// Nothing writes to the pages of a fetch any more.
    pub fn handle_fetch_ended(&self, id: FetchId, end: FetchEnd) {
        self.tell(BlockCommand::FetchEnded { id, end });
    }

    /// A question whose answer is given back by a command if it comes too late.
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
