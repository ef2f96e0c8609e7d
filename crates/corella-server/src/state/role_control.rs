//! Knows and changes the role of this server among the nodes of a cluster.

use std::pin::Pin;

use serde::Serialize;

use crate::state::cluster_status::ClusterStatus;

/// Knows the roles of this node, and changes them while the server serves.
pub trait RoleControl: Send + Sync {
    fn status(&self) -> RoleStatus;

    /// Returns the status of this node and of its peers; `None` if this node serves alone.
    fn cluster(&self) -> Option<ClusterStatus>;

    /// Returns why this node can serve no request in its role, or `None` if it can.
    fn obstacle(&self) -> Option<&'static str>;

    /// Begins to change the role at once. The future ends when the role has changed; dropping it does not stop the
    /// change.
    fn change(&self, role: &str) -> RoleChange;
}

pub type RoleChange = Pin<Box<dyn Future<Output = Result<(), RoleError>> + Send>>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoleStatus {
    pub role: &'static str,
    /// The next role, while this node finishes the obligations of its present role.
    pub changing_to: Option<&'static str>,
    /// This node as a source of cached blocks for other nodes, in the form of `kv_transfer_params`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_blocks: Option<BlockSite>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockSite {
    pub host: String,
    pub port: u16,
    /// A socket inside the host that `machine` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoleError {
    /// The role does not exist.
    Unknown,
    /// Why the server cannot have the role now, in a sentence.
    Conflict(String),
}
