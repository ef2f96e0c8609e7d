//! The status of a cluster's node, and of the nodes that it serves with.

use serde::Serialize;

/// Limits the nodes that a status lists.
pub const MAX_NODES: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClusterStatus {
    pub role: &'static str,
    /// The next role, while this node finishes the obligations of its present role.
    pub changing_to: Option<&'static str>,
    /// Unfinished requests that this node serves with others.
    pub sessions: usize,
    /// Running loads of KV rows: on a decode node the incoming loads, on a prefill node the requested loads that it
    /// does not send yet.
    pub loads: usize,
    /// The bytes of KV rows that were sent, and the tokens that came back. Decode nodes send no rows.
    pub sent_bytes: Option<u64>,
    pub remote_tokens: Option<u64>,
    /// The number of other known nodes, and the first of them.
    pub num_nodes: usize,
    pub nodes: Vec<NodeStatus>,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeStatus {
    pub id: String,
    /// The address for sessions with the node.
    pub address: String,
    /// A prefill node's view of a decode node: `healthy`, `suspect`, `incompatible` or `draining`.
    pub standing: Option<&'static str>,
    /// The load that the node reports.
    pub running: Option<u32>,
    pub waiting: Option<u32>,
    pub free_pages: Option<u32>,
    /// Measured bytes per second over the link to the node.
    pub bandwidth: Option<u64>,
}
