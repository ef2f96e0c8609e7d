//! KV of requests that are prefilled on one node and decoded on another: what the engine of either
//! node is told, and what it tells.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use corella_core::{KvEvent, KvFact, LostKv, RequestId, Reservation, TokenId};

use crate::command::Command;
use crate::doorbell::CommandSender;
use crate::feed::FeedReader;
use crate::token_stream::TokenStream;

/// Says what has become of KV that others bring or fetch.
#[derive(Clone)]
pub struct KvExchange {
    pub(crate) commands: CommandSender,
}

/// The scheduler's KV facts, in order.
pub struct KvFacts(pub(crate) FeedReader<KvFact>);

impl KvFacts {
    /// Blocks until there is a fact. `None` when the engine has stopped, or there is a newer
    /// subscriber.
    pub fn next_blocking(&self) -> Option<KvFact> {
        self.0.next_blocking()
    }

    /// `None` when there is nothing now.
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
    /// The pages to fill; there once the stream has said `Accepted`.
    pub fn reservation(&self) -> Option<&Reservation> {
        self.reservation.get()
    }

    /// The engine's name of the adapter that the request is computed with.
    pub fn adapter(&self) -> Option<&str> {
        self.adapter.as_deref()
    }
}

/// What the loop is told of KV that moves.
pub(crate) enum KvCommand {
    Arrived { request: RequestId, token: TokenId },
    RowsArrived(RequestId),
    Lost { request: RequestId, how: LostKv },
    ReleaseHold(RequestId),
    RenewHold { request: RequestId, lease: Duration },
}

impl KvExchange {
    /// All rows of a reservation have arrived, and `token` was drawn after them.
    pub fn handle_kv_arrived(&self, request: RequestId, token: TokenId) {
        self.tell(KvCommand::Arrived { request, token });
    }

    /// All rows of a reservation have arrived, and the token after them is to be drawn here.
    pub fn handle_rows_arrived(&self, request: RequestId) {
        self.tell(KvCommand::RowsArrived(request));
    }

    /// Nothing writes to the reserved pages any more, although not all rows have come.
    pub fn handle_kv_lost(&self, request: RequestId, how: LostKv) {
        self.tell(KvCommand::Lost { request, how });
    }

    /// Nobody reads the pages that a request has exported any more.
    pub fn release_hold(&self, request: RequestId) {
        self.tell(KvCommand::ReleaseHold(request));
    }

    /// The exported pages of a request are still being read, and are held for `lease` from now.
    pub fn renew_hold(&self, request: RequestId, lease: Duration) {
        self.tell(KvCommand::RenewHold { request, lease });
    }

    fn tell(&self, command: KvCommand) {
        self.commands.send(Command::Kv(command));
    }
}

/// What the prefix cache holds, as it comes and goes. Dropping it ends the subscription.
pub struct KvEventStream(pub(crate) FeedReader<KvEvent>);

impl KvEventStream {
    /// `None` when the engine has stopped, or someone else has subscribed.
    pub fn next_blocking(&mut self) -> Option<KvEvent> {
        self.0.next_blocking()
    }

    /// `None` when there is nothing now.
    pub fn try_next(&mut self) -> Option<KvEvent> {
        self.0.try_next()
    }
}
