//! The clients, streams and tasks of a prefill node's sessions, which must be woken, closed or stopped.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use corella_core::session::SessionKey;
use corella_core::{RequestId, SessionId};
use corella_engine::{LoadedAdapter, StreamEvent, StreamRelay, TokenConstraint, TraceScope};
use tokio::task::AbortHandle;

use crate::session::link::Link;
use crate::session::wire::Envelope;

/// The sessions. A session is removed when it has no client, stream or task left.
#[derive(Default)]
pub struct SessionTable(HashMap<SessionId, Session>);

#[derive(Default)]
struct Session {
    client: Option<Client>,
    attempts: Vec<Attempt>,
    /// Tasks that read the outputs of the session's runs.
    readers: Vec<(RequestId, AbortHandle)>,
}

pub struct Client {
    pub relay: StreamRelay,
    pub is_accepted: bool,
    pub trace_id: Option<Arc<str>>,
    pub facts: ClientFacts,
}

/// A client's request with the facts that only this node knows.
#[derive(Clone)]
pub struct ClientFacts {
    pub adapter: Option<Arc<LoadedAdapter>>,
    pub constraint: Option<Arc<dyn TokenConstraint>>,
    pub trace: Option<TraceScope>,
}

/// The stream to a decode node.
pub struct Attempt {
    key: SessionKey,
    pub link: Link<Envelope>,
    /// When the decode node was told the first token. `None` again once the decode node has drawn a token.
    pub handed_over_at: Option<Instant>,
}

impl SessionTable {
    pub fn begin(&mut self, id: SessionId, client: Client) {
        self.session(id).client = Some(client);
    }

    pub fn client(&mut self, id: SessionId) -> Option<&mut Client> {
        self.0.get_mut(&id)?.client.as_mut()
    }

    /// Removes a client that has its last event, or has left.
    pub fn leave(&mut self, id: SessionId) {
        self.change(id, |session| session.client = None);
    }

    pub fn open(&mut self, key: SessionKey, link: Link<Envelope>) {
        self.session(key.session).attempts.push(Attempt {
            key,
            link,
            handed_over_at: None,
        });
    }

    pub fn attempt(&mut self, key: SessionKey) -> Option<&mut Attempt> {
        let session = self.0.get_mut(&key.session)?;
        session
            .attempts
            .iter_mut()
            .find(|attempt| attempt.key == key)
    }

    /// Closes an attempt's stream after the messages already sent.
    pub fn close(&mut self, key: SessionKey) {
        self.change(key.session, |session| {
            session.attempts.retain(|attempt| attempt.key != key);
        });
    }

    pub fn add_reader(&mut self, id: SessionId, request: RequestId, reader: AbortHandle) {
        self.session(id).readers.push((request, reader));
    }

    pub fn take_reader(&mut self, id: SessionId, request: RequestId) -> Option<AbortHandle> {
        self.change(id, |session| {
            let mut readers = session.readers.iter();
            let at = readers.position(|(read, _)| *read == request)?;
            Some(session.readers.swap_remove(at).1)
        })?
    }

    fn session(&mut self, id: SessionId) -> &mut Session {
        self.0.entry(id).or_default()
    }

    /// Changes a session, and removes it if it is empty.
    fn change<T>(&mut self, id: SessionId, change: impl FnOnce(&mut Session) -> T) -> Option<T> {
        let session = self.0.get_mut(&id)?;
        let changed = change(session);
        let is_over =
            session.client.is_none() && session.attempts.is_empty() && session.readers.is_empty();
        if is_over {
            self.0.remove(&id);
        }
        Some(changed)
    }
}

impl Client {
    pub fn new(relay: StreamRelay, trace_id: Option<Arc<str>>, facts: ClientFacts) -> Self {
        Self {
            relay,
            is_accepted: false,
            trace_id,
            facts,
        }
    }

    pub fn accept(&mut self) {
        if !std::mem::replace(&mut self.is_accepted, true) {
            self.relay.send(StreamEvent::Accepted);
        }
    }
}
