//! How a prefill node finds a decode node for a request, and tells what has come of asking it.

use std::time::Duration;

use corella_core::session::{Mismatch, Peer};
use corella_core::{ComputePlace, DecodeNode, Namespace, NodeId, Request, SessionId, TokenId};
use tonic::transport::Channel;

use super::stay::StayReason;
use super::wire::KvAddress;

/// Who is to decode a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Peer(Peer),
    /// It is as well decoded here.
    Here(StayReason),
    /// A decode node should, and none is left.
    Nobody,
}

/// A node that is said to have the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub node: NodeId,
    pub num_rows: u32,
}

/// The decode nodes that there are, and what has come of asking them.
pub trait DecodePeers: Send + Sync + 'static {
    /// Chooses a node to decode a request.
    fn choose(&self, search: &Search<'_>) -> Choice;

    /// A connection to a node that was chosen.
    fn channel(&self, node: NodeId) -> Option<Channel>;

    /// Where a node's cached blocks are loaded from, once the node has said so. `None` for a node of other weight or KV
    /// formats or another instruction set: its rows have other bits.
    fn kv_address(&self, _node: NodeId) -> Option<KvAddress> {
        None
    }

    /// A node has, or is about to have, the rows of a prompt.
    fn note_sent(&self, _request: &Request, _peer: Peer) {}

    /// The node that is likely to have the most of a prompt, such as the one that decoded the turn before.
    fn holder(&self, _namespace: &Namespace, _prompt: &[TokenId]) -> Option<Holder> {
        None
    }

    /// The node that computes the rest of every prompt that a decode node has a part of; `None` if costs decide.
    fn compute_place(&self) -> Option<ComputePlace> {
        None
    }

    /// A node's load and the link to it, as far as they are known.
    fn facts(&self, _node: NodeId) -> Option<DecodeNode> {
        None
    }

    fn mark_suspect(&self, node: NodeId);

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch);

    /// The node has pages for the session, as its `granted_as`-th reservation.
    fn handle_granted(&self, _session: SessionId, _node: NodeId, _granted_as: u64) {}

    /// Forgets the node that was chosen last for the session.
    fn handle_left(&self, _session: SessionId) {}

    /// The node has received `num_bytes`, which takes `elapsed` at the speed of its link.
    fn handle_transfer(&self, _node: NodeId, _num_bytes: u64, _elapsed: Duration) {}
}

/// A request that looks for a decode node.
pub struct Search<'a> {
    pub session: SessionId,
    pub request: &'a Request,
    /// Nodes that are not to be asked again.
    pub tried: &'a [NodeId],
    /// Where another choice of the same prompt goes, or a node that has most of the prompt: rows will be there.
    pub near: Option<NodeId>,
    /// Whether this node may decode it if that is quicker, or if no other node has room.
    pub falls_back: bool,
    /// How long 1,024 prompt tokens take on this node, in microseconds; 0 while nobody has measured
    /// it.
    pub prefill_us: u64,
}
