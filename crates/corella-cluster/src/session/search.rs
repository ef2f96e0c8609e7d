//! The interface between a prefill node's sessions and the decode nodes that it knows.

use std::time::Duration;

use corella_core::session::{Mismatch, Peer};
use corella_core::{ComputeDecision, ComputeQuery, NodeId, PageHash, Route, RouteQuery, SessionId};
use tonic::transport::Channel;

use super::wire::KvAddress;

/// The known decode nodes. Choices are those of [`Directory`](corella_core::Directory).
pub trait DecodePeers: Send + Sync + 'static {
    /// Chooses the route of a request.
    fn route(&self, query: &RouteQuery<'_>) -> Route;

    /// Chooses the node that computes the rest of a prompt.
    fn decide(&self, query: &ComputeQuery) -> ComputeDecision;

    /// Returns a connection to a chosen node.
    fn channel(&self, node: NodeId) -> Option<Channel>;

    /// Returns the source of a node's cached blocks, once the node has named it. `None` for a node with other weight or
    /// KV formats or another instruction set: its rows have other bits.
    fn kv_address(&self, _node: NodeId) -> Option<KvAddress> {
        None
    }

    /// Records that a node has pages for a session, as its `granted_as`-th reservation, and will have the rows of its
    /// prompt, whose last whole block has the hash `last`.
    fn handle_allocated(
        &self,
        _session: SessionId,
        _last: Option<PageHash>,
        _peer: Peer,
        _granted_as: Option<u64>,
    ) {
    }

    /// Forgets the node that was chosen last for the session.
    fn handle_left(&self, _session: SessionId) {}

    /// Records that the node has received `num_bytes`, which takes `elapsed` at the speed of its link.
    fn handle_transfer(&self, _node: NodeId, _num_bytes: u64, _elapsed: Duration) {}

    fn mark_suspect(&self, node: NodeId);

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch);
}
