//! The configuration of a node.

use std::net::SocketAddr;
use std::time::Duration;

use corella_core::{ComputePlace, PeerPolicy};
use corella_engine::Tracer;

use super::error::{NodeError, transport_error};
use crate::blocks::FetchConfig;
use crate::kv_connector::Network;
use crate::registry::{RegistryUrl, Role};
use crate::tls::{ClusterTls, TlsFiles};
use crate::transport::PathKind;

/// The role of a node and its connections to other nodes.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The role at the start.
    pub role: Role,
    /// Whether the node listens for other nodes in every role, so that proxies may pair it.
    pub listens: bool,
    pub registry: Option<RegistryUrl>,
    pub listen: SocketAddr,
    /// Networks that requests may name for their KV rows, besides this machine.
    pub kv_peer_allow: Vec<Network>,
    /// The limit of connections of other nodes to a decode node.
    pub max_connections: usize,
    /// The limit of connections of one address to `listen`.
    pub max_connections_per_address: usize,
    /// The host that other nodes are told, if it differs from the host of `listen`.
    pub advertise: Option<String>,
    pub tls: Option<TlsFiles>,
    /// Exports the spans of other nodes' requests, if tracing is on.
    pub tracer: Option<Tracer>,
    pub node_id: Option<String>,
    /// The name of the group of nodes that work together. Empty for nodes without a name.
    pub group: String,
    pub policy: PeerPolicy,
    pub min_tokens: u32,
    /// The longest prompt that a decode node takes.
    pub max_prompt_tokens: Option<u32>,
    /// The node that computes the rest of a prompt, if a decode node has cached a part of it. `None` compares the
    /// costs.
    pub compute_place: Option<ComputePlace>,
    /// Whether a prefill node decodes requests that every decode node refuses.
    pub falls_back: bool,
    /// The limit of the search for a decode node that takes a request.
    pub search_timeout: Duration,
    /// The limit of the transfer of a computed prompt's KV rows, in addition to the time that the bytes need.
    pub load_time: Duration,
    pub uses_network: bool,
    pub uses_host: bool,
    /// The row paths besides `tcp` and `shm`, which every node has.
    pub row_paths: Vec<PathKind>,
    pub max_bandwidth: Option<u64>,
    pub num_threads: usize,
    /// `None` for a node that fetches no cached blocks from others.
    pub fetches: Option<FetchConfig>,
}

impl NodeConfig {
    /// Loads the TLS files, if there are any, for the host at which other nodes reach this node.
    pub fn load_tls(&self) -> Result<Option<ClusterTls>, NodeError> {
        let Some(files) = &self.tls else {
            return Ok(None);
        };
        let tls = ClusterTls::load(files, &self.host());
        tls.map(Some)
            .map_err(|error| NodeError::Config(error.to_string()))
    }

    /// Loads the libraries that the row paths need.
    pub fn load_paths(&self) -> Result<(), NodeError> {
        self.row_paths.iter().try_for_each(|kind| {
            let loaded = kind.load.map_or(Ok(()), |load| load());
            loaded.map_err(|error| transport_error(kind.option, error))
        })
    }

    /// Returns the host at which other nodes reach this node.
    pub fn host(&self) -> String {
        self.advertise.clone().unwrap_or_else(|| match self.listen {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        })
    }
}
