//! The commands of callers to the loop.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use corella_core::{KvEvent, KvFact, PinError, Request, RequestId, Reservation, TokenId};
use crossbeam_channel::Sender;

use crate::block_command::BlockCommand;
use crate::block_exchange::BlockFact;
use crate::engine_error::ResetError;
use crate::engine_watch::WatchEnd;
use crate::feed::Subscriber;
use crate::kv_exchange::KvCommand;
use crate::token_constraint::TokenConstraint;
use crate::token_stream::StreamSender;

/// A command of a caller to the loop.
pub(crate) enum Command {
    Add {
        requests: Vec<Request>,
        senders: Vec<StreamSender>,
        constraint: Option<Arc<dyn TokenConstraint>>,
        is_accepted: bool,
    },
    /// Its pages are to be filled within `timeout`.
    Reserve {
        request: Box<Request>,
        timeout: Duration,
        sender: StreamSender,
        constraint: Option<Arc<dyn TokenConstraint>>,
        reservation: Arc<OnceLock<Reservation>>,
    },
    Abort(RequestId),
    Kv(KvCommand),
    SubscribeKvFacts(Subscriber<KvFact>),
    Block(BlockCommand),
    SubscribeBlockFacts(Subscriber<BlockFact>),
    PinPrefix {
        tokens: Vec<TokenId>,
        reply: Sender<Result<usize, PinError>>,
    },
    SubscribeKvEvents {
        salt: u64,
        subscriber: Subscriber<KvEvent>,
    },
    ResetPrefixCache(Sender<Result<(), ResetError>>),
    Watch(WatchEnd),
    Stop,
}
