//! What a node of a cluster tells of itself and of the nodes that it serves with.

use serde::Serialize;

/// The most nodes that a status lists.
pub const MAX_NODES: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClusterStatus {
    pub role: &'static str,
    /// The next role, while the present one finishes what it owes.
    pub changing_to: Option<&'static str>,
    /// Requests that this node serves with others, and that have not ended.
    pub sessions: usize,
    /// Loads of KV rows that run: those that come to a decode node, and those that a prefill node has
    /// been asked for and does not send yet.
    pub loads: usize,
    /// Bytes of KV rows that were sent, and tokens that came back for them. Decode nodes send none.
    pub sent_bytes: Option<u64>,
    pub remote_tokens: Option<u64>,
    /// How many other nodes are known, and the first of them.
    pub num_nodes: usize,
    pub nodes: Vec<NodeStatus>,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeStatus {
    pub id: String,
    /// Where it takes sessions.
    pub address: String,
    /// What a prefill node knows of a decode node: `healthy`, `suspect`, `incompatible` or `draining`.
    pub standing: Option<&'static str>,
    /// What it has reported of its load.
    pub running: Option<u32>,
    pub waiting: Option<u32>,
    pub free_pages: Option<u32>,
    /// Measured bytes per second over the link to it.
    pub bandwidth: Option<u64>,
}
