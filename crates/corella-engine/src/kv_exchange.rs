//! KV of requests that are prefilled on one node and decoded on another: the reports to the engine
//! of either node, and its facts.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use corella_core::{KvEvent, KvFact, LostKv, RequestId, Reservation, TokenId};

use crate::command::Command;
use crate::doorbell::CommandSender;
use crate::feed::FeedReader;
use crate::token_stream::TokenStream;

/// Reports on KV that others bring or fetch.
#[derive(Clone)]
pub struct KvExchange {
    pub(crate) commands: CommandSender,
}

/// The scheduler's KV facts, in order.
pub struct KvFacts(pub(crate) FeedReader<KvFact>);

impl KvFacts {
    /// Blocks until the next fact. `None` when the engine has stopped, or a newer subscriber has replaced this one.
    pub fn next_blocking(&self) -> Option<KvFact> {
        self.0.next_blocking()
    }

    /// `None` without a pending fact.
    pub fn try_next(&self) -> Option<KvFact> {
        self.0.try_next()
    }
}

/// A request whose KV another node brings.
pub struct Receipt {
    pub stream: TokenStream,
    pub(crate) adapter: Option<Arc<str>>,
    pub(crate) reservation: Arc<OnceLock<Reservation>>,
}

impl Receipt {
    /// The pages to fill; present once the stream has returned `Accepted`.
    pub fn reservation(&self) -> Option<&Reservation> {
        self.reservation.get()
    }

    /// The engine's name of the request's adapter.
    pub fn adapter(&self) -> Option<&str> {
        self.adapter.as_deref()
    }
}

/// Reports to the loop about moving KV.
pub(crate) enum KvCommand {
    Arrived { request: RequestId, token: TokenId },
    RowsArrived(RequestId),
    Lost { request: RequestId, how: LostKv },
    ReleaseHold(RequestId),
    RenewHold { request: RequestId, lease: Duration },
}

impl KvExchange {
    /// Reports that all rows of a reservation have arrived, and `token` was drawn after them.
    pub fn handle_kv_arrived(&self, request: RequestId, token: TokenId) {
        self.tell(KvCommand::Arrived { request, token });
    }

    /// Reports that all rows of a reservation have arrived, without a drawn token.
    pub fn handle_rows_arrived(&self, request: RequestId) {
        self.tell(KvCommand::RowsArrived(request));
    }

    /// Reports that all writes to the reserved pages have ended, before all rows have arrived.
    pub fn handle_kv_lost(&self, request: RequestId, how: LostKv) {
        self.tell(KvCommand::Lost { request, how });
    }

    /// Reports that all reads of a request's exported pages have ended.
    pub fn release_hold(&self, request: RequestId) {
        self.tell(KvCommand::ReleaseHold(request));
    }

    /// Reports reads of a request's exported pages, which are held for `lease` from now.
    pub fn renew_hold(&self, request: RequestId, lease: Duration) {
        self.tell(KvCommand::RenewHold { request, lease });
    }

    fn tell(&self, command: KvCommand) {
        self.commands.send(Command::Kv(command));
    }
}

/// The changes of the prefix cache. Dropping the stream ends the subscription.
pub struct KvEventStream(pub(crate) FeedReader<KvEvent>);

impl KvEventStream {
    /// `None` when the engine has stopped, or a newer subscriber has replaced this one.
    pub fn next_blocking(&mut self) -> Option<KvEvent> {
        self.0.next_blocking()
    }

    /// `None` without a pending event.
    pub fn try_next(&mut self) -> Option<KvEvent> {
        self.0.try_next()
    }
}
