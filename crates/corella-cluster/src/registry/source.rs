//! The interface between a registry of any kind and the driver.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;

use super::{NodeList, NodeRecord, Role};

/// A future that ends with the reason why the registry cannot be used now, for an operator.
pub(super) type Following<'a> = Pin<Box<dyn Future<Output = String> + Send + 'a>>;

/// A list of nodes, which may include this one.
pub(super) trait Source: Send {
    /// Publishes the record in `exchange` and follows the records of other nodes until an error. Then the driver calls
    /// this method again. `exchange` gets the list at every change, and every few seconds, because the peer table does
    /// not always believe a single list.
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a>;
}

/// Connects a source with the rest of the node.
pub(super) struct Exchange {
    own: watch::Receiver<Option<NodeRecord>>,
    published: watch::Sender<bool>,
    nodes: Arc<dyn NodeList>,
    /// The role of this node's peers. Nodes of other roles or groups are not peers. Nodes with an unknown role may be
    /// peers.
    peer_role: Role,
    group: String,
    /// The last published record of this node. A node is never its own peer, not even while it leaves.
    last_own: Option<NodeRecord>,
    has_lists: bool,
    pub(super) is_outage_logged: bool,
}

impl Exchange {
    pub fn new(
        own: watch::Receiver<Option<NodeRecord>>,
        published: watch::Sender<bool>,
        nodes: Arc<dyn NodeList>,
        (peer_role, group): (Role, String),
    ) -> Self {
        Self {
            own,
            published,
            nodes,
            peer_role,
            group,
            last_own: None,
            has_lists: false,
            is_outage_logged: false,
        }
    }

    /// Returns the record to publish now, if any.
    pub fn own(&mut self) -> Option<NodeRecord> {
        self.own.borrow_and_update().clone()
    }

    /// Waits until [`own`](Self::own) has changed.
    pub async fn own_changed(&mut self) {
        if self.own.changed().await.is_err() {
            // The registry is being dropped, and this task with the registry.
            std::future::pending::<()>().await;
        }
    }

    /// Must be called when the other nodes can see the latest value of [`own`](Self::own), which may be `None`.
    pub fn set_published(&self, is_published: bool) {
        self.published.send_replace(is_published);
    }

    /// Takes a complete list, which may include this node.
    pub fn give(&mut self, mut list: Vec<NodeRecord>) {
        if let Some(own) = &*self.own.borrow() {
            self.last_own = Some(own.clone());
        }
        list.retain(|record| {
            let is_own = self.last_own.as_ref().is_some_and(|own| {
                // A list of addresses alone allows no other comparison.
                let is_same_address = own.session_address == record.session_address;
                own.instance_id == record.instance_id
                    || record.incarnation.is_none() && is_same_address
            });
            let may_serve = record
                .role
                .is_none_or(|role| role == self.peer_role && record.group == self.group);
            !is_own && may_serve
        });
        if !self.has_lists || self.is_outage_logged {
            tracing::info!("the registry lists {} other nodes", list.len());
            self.has_lists = true;
            self.is_outage_logged = false;
        }
        self.nodes.handle_list(list);
    }
}
