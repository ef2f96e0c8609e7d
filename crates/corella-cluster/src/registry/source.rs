//! What a registry of any kind does for the driver.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;

use super::{NodeRecord, Peers, Role};

/// Why a registry cannot be used at present, for an operator to read.
#[derive(Debug)]
pub(super) struct SourceError(pub String);

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<String> for SourceError {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

pub(super) type Following<'a> = Pin<Box<dyn Future<Output = SourceError> + Send + 'a>>;

/// Where nodes are listed, and perhaps this one as well.
pub(super) trait Source: Send {
    /// Publishes this node as `exchange` has it and follows what the others publish, until something
    /// fails; the driver then calls it again. The list is given to `exchange` at every change, and
    /// every few seconds anyway, as the peer table does not always believe a single list.
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a>;
}

/// Between a source and the rest of the node.
pub(super) struct Exchange {
    own: watch::Receiver<Option<NodeRecord>>,
    published: watch::Sender<bool>,
    peers: Arc<Peers>,
    /// Nodes of other roles are no peers; those that have not said theirs may be.
    peer_role: Role,
    /// This node as it was last published: it is no peer of its own, not even when it leaves.
    last_own: Option<NodeRecord>,
    has_lists: bool,
    pub(super) is_outage_logged: bool,
}

impl Exchange {
    pub fn new(
        own: watch::Receiver<Option<NodeRecord>>,
        published: watch::Sender<bool>,
        peers: Arc<Peers>,
        peer_role: Role,
    ) -> Self {
        Self {
            own,
            published,
            peers,
            peer_role,
            last_own: None,
            has_lists: false,
            is_outage_logged: false,
        }
    }

    /// What is to be published of this node at present, if anything.
    pub fn own(&mut self) -> Option<NodeRecord> {
        self.own.borrow_and_update().clone()
    }

    /// Waits until [`own`](Self::own) has something new to say.
    pub async fn own_changed(&mut self) {
        if self.own.changed().await.is_err() {
            // The registry is being dropped, and this task with it.
            std::future::pending::<()>().await;
        }
    }

    /// Must be called once the others can see the latest value of [`own`](Self::own), whether that
    /// is a record or none.
    pub fn set_published(&self, is_published: bool) {
        self.published.send_replace(is_published);
    }

    /// A complete list, which may have this node in it.
    pub fn give(&mut self, mut list: Vec<NodeRecord>) {
        if let Some(own) = &*self.own.borrow() {
            self.last_own = Some(own.clone());
        }
        list.retain(|record| {
            let is_own = { self.last_own.as_ref() }.is_some_and(|own| {
                // Where a mere address is listed, it is all there is to compare.
                let is_same_address = own.session_address == record.session_address;
                own.instance_id == record.instance_id
                    || record.incarnation.is_none() && is_same_address
            });
            let may_serve = { record.role }.is_none_or(|role| role == self.peer_role);
            !is_own && may_serve
        });
        if !self.has_lists || self.is_outage_logged {
            tracing::info!("the registry lists {} other nodes", list.len());
            self.has_lists = true;
            self.is_outage_logged = false;
        }
        self.peers.handle_list(list);
    }
}
