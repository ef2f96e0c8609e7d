//! The commands of callers to the loop.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use corella_core::{
    BlockList, HoldId, KvEvent, KvFact, Namespace, Request, Reservation, Scheduler, TokenId,
};
use crossbeam_channel::Sender;

use crate::request::block_fact::BlockFact;
use crate::request::stream_sender::StreamSender;
use crate::state::engine_error::ResetError;
use crate::token_constraint::TokenConstraint;
use crate::wake::answer::Reply;
use crate::wake::doorbell::LoopSender;
use crate::wake::feed::Subscriber;
use crate::watch::engine_watch::WatchEnd;

pub(crate) type CommandSender = LoopSender<Command>;

/// A command of a caller to the loop.
pub(crate) enum Command {
    Add {
        requests: Vec<Request>,
        senders: Vec<StreamSender>,
        constraint: Option<Arc<dyn TokenConstraint>>,
        is_accepted: bool,
    },
    /// The request's pages must be filled within `timeout`.
    Reserve {
        request: Box<Request>,
        timeout: Duration,
        sender: StreamSender,
        constraint: Option<Arc<dyn TokenConstraint>>,
        reservation: Arc<OnceLock<Reservation>>,
    },
    Scheduler(SchedulerCall),
    SubscribeKvFacts(Subscriber<KvFact>),
    ReleaseBlocks {
        id: HoldId,
        reply: Reply<bool>,
    },
    /// Brings the blocks of a list from the disk. The reply is dropped when no more blocks come.
    BringBlocks {
        list: BlockList,
        reply: Reply<()>,
    },
    SubscribeBlockFacts(Subscriber<BlockFact>),
    SubscribeCopyOffers(Subscriber<(Namespace, Vec<TokenId>)>),
    SubscribeKvEvents {
        salt: u64,
        subscriber: Subscriber<KvEvent>,
    },
    ResetPrefixCache(Sender<Result<(), ResetError>>),
    /// Stores all cached blocks on the disk once no request is left. The reply is dropped when no more blocks are
    /// stored.
    StoreCache(Sender<()>),
    Watch(WatchEnd),
    Stop,
}

/// A call of the scheduler on the loop's thread, with the engine's time in microseconds.
type SchedulerCall = Box<dyn FnOnce(&mut Scheduler, u64) + Send>;

impl Command {
    pub fn scheduler(call: impl FnOnce(&mut Scheduler, u64) + Send + 'static) -> Self {
        Self::Scheduler(Box::new(call))
    }
}
