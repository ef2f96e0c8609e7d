//! Reports to an engine about the KV of requests that one node prefills and another node decodes.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use corella_core::{LostKv, RequestId, Reservation, Scheduler, TokenId};

use crate::request::command::{Command, CommandSender};
use crate::request::token_stream::TokenStream;

/// Reports to the engine on KV that other nodes bring or fetch.
#[derive(Clone)]
pub struct KvExchange {
    pub(crate) commands: CommandSender,
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

impl KvExchange {
    /// Reports that all rows of a reservation have arrived, and `token` was drawn after them.
    pub fn handle_kv_arrived(&self, request: RequestId, token: TokenId) {
        self.tell(move |scheduler, _| {
            if !scheduler.handle_kv_arrived(request, token) {
                // The request has just ended, and its stream reports that. All writes to its pages have ended.
                scheduler.release_hold(request);
            }
        });
    }

    /// Reports that all rows of a reservation have arrived, without a drawn token.
    pub fn handle_rows_arrived(&self, request: RequestId) {
        self.tell(move |scheduler, _| {
            if !scheduler.handle_rows_arrived(request) {
                scheduler.release_hold(request);
            }
        });
    }

    /// Reports that all writes to the reserved pages have ended although some rows have not arrived.
    pub fn handle_kv_lost(&self, request: RequestId, how: LostKv) {
        self.tell(move |scheduler, _| {
            scheduler.handle_kv_lost(request, how);
        });
    }

    /// Reports that all reads of a request's exported pages have ended.
    pub fn release_hold(&self, request: RequestId) {
        self.tell(move |scheduler, _| {
            scheduler.release_hold(request);
        });
    }

    /// Reports reads of a request's exported pages, which are held for `lease` from now.
    pub fn renew_hold(&self, request: RequestId, lease: Duration) {
        self.tell(move |scheduler, now_us| {
            scheduler.renew_hold(request, now_us + lease.as_micros() as u64);
        });
    }

    fn tell(&self, report: impl FnOnce(&mut Scheduler, u64) + Send + 'static) {
        self.commands.send(Command::scheduler(report));
    }
}
