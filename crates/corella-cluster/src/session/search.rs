//! How a prefill node finds a decode node for a request, and reports the outcome of asking it.

use std::time::Duration;

use corella_core::session::{Mismatch, Peer};
use corella_core::{ComputePlace, DecodeNode, Namespace, NodeId, Request, SessionId, TokenId};
use tonic::transport::Channel;

use super::stay::StayReason;
use super::wire::KvAddress;

/// The node that decodes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Peer(Peer),
    /// Decoding here is as good.
    Here(StayReason),
    /// The request needs a decode node, and none is left.
    Nobody,
}

/// A node that probably has the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub node: NodeId,
    pub num_rows: u32,
}

/// The known decode nodes, and the outcomes of asking them.
pub trait DecodePeers: Send + Sync + 'static {
    /// Chooses a node to decode a request.
    fn choose(&self, search: &Search<'_>) -> Choice;

    /// Returns a connection to a chosen node.
    fn channel(&self, node: NodeId) -> Option<Channel>;

    /// Returns the source of a node's cached blocks, once the node has named it. `None` for a node with other weight or
    /// KV formats or another instruction set: its rows have other bits.
    fn kv_address(&self, _node: NodeId) -> Option<KvAddress> {
        None
    }

    /// Records that a node has, or will soon have, the rows of a prompt.
    fn note_sent(&self, _request: &Request, _peer: Peer) {}

    /// Returns the node that probably has the most of a prompt, such as the one that decoded the turn before.
    fn holder(&self, _namespace: &Namespace, _prompt: &[TokenId]) -> Option<Holder> {
        None
    }

    /// Returns the node that computes the rest of every prompt that a decode node has in part; `None` if costs
    /// decide.
    fn compute_place(&self) -> Option<ComputePlace> {
        None
    }

    /// Returns the known facts about a node's load and the link to it.
    fn facts(&self, _node: NodeId) -> Option<DecodeNode> {
        None
    }

    fn mark_suspect(&self, node: NodeId);

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch);

    /// Records that the node has pages for the session, as its `granted_as`-th reservation.
    fn handle_granted(&self, _session: SessionId, _node: NodeId, _granted_as: u64) {}

    /// Forgets the node that was chosen last for the session.
    fn handle_left(&self, _session: SessionId) {}

    /// Records that the node has received `num_bytes`, which takes `elapsed` at the speed of its link.
    fn handle_transfer(&self, _node: NodeId, _num_bytes: u64, _elapsed: Duration) {}
}

/// A request that looks for a decode node.
pub struct Search<'a> {
    pub session: SessionId,
    pub request: &'a Request,
    /// Nodes that must not be asked again.
    pub tried: &'a [NodeId],
    /// The node of another choice with the same prompt, or a node with most of the prompt: rows will be there.
    pub near: Option<NodeId>,
    /// Whether this node may decode it if that is faster, or if no other node has room.
    pub falls_back: bool,
    /// Time that 1,024 prompt tokens take on this node, in microseconds; 0 before the first
    /// measurement.
    pub prefill_us: u64,
}
