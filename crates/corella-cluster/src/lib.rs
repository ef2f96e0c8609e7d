//! Several nodes that serve as one.
//!
//! The registry lists the nodes. The peer table of `corella-core` keeps the facts about each, and decides where a
//! request goes. A prefill node and a decode node serve a request together: `session` drives the state machines of
//! `corella-core` from the request's arrival to its last token, over one gRPC stream for each request.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `clock`: the time for state machines.
//! * `driver`: passes facts and the time to a state machine, and carries out its actions.
//! * `metric`: encodes a metric that is read at each scrape.
//! * `peer_log`: limits log lines about a peer.
//! * `tls`: secures connections between nodes.
//! * `registry`: lists the nodes.
//! * `transport`: moves KV rows from memory to memory.
//! * `exporter`: carries out the export tasks of the core with the sender.
//! * `blocks`: cached blocks that one node loads from another.
//! * `kv_connector`: prompts that a proxy has one node compute for another.
//! * `kv_store`: blocks in a store of another program.
//! * `session`: requests that two nodes serve together.
//! * `node`: a node and its role.

pub mod blocks;
mod clock;
mod driver;
mod exporter;
pub mod kv_connector;
pub mod kv_store;
mod metric;
pub mod node;
mod peer_log;
mod registry;
pub mod session;
mod tls;
pub mod transport;

pub use registry::{
    NodeList, NodeRecord, Peers, Registry, RegistryConfig, RegistryError, RegistryUrl,
    RegistryUrlError, Role,
};
pub use tls::{ClusterTls, TlsError, TlsFiles};
