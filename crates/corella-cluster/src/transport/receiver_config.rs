//! The configuration of a receiver.

use std::sync::Arc;
use std::time::Duration;

use corella_core::Arithmetic;

use super::path::own_paths;
use super::row_path::RowPath;
use crate::tls::ClusterTls;

#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    pub incarnation: u64,
    pub model_fingerprint: u128,
    /// The properties that decide the bits of this node's rows.
    pub arithmetic: Arithmetic,
    pub connections_per_peer: usize,
    pub max_loads: usize,
    pub max_peers: usize,
    /// The number of bytes of one load that a sender may send before it receives credit.
    pub window_bytes: u32,
    /// The limit of one attempt, greeting included. The other end answers at once, but may wait for a core.
    pub connect_timeout: Duration,
    pub num_connect_attempts: usize,
    /// Used for connections that leave the host.
    pub tls: Option<ClusterTls>,
    /// The paths by which rows may come from senders that also have them.
    pub paths: Vec<Arc<dyn RowPath>>,
}

impl ReceiverConfig {
    pub fn new(incarnation: u64, model_fingerprint: u128, arithmetic: Arithmetic) -> Self {
        Self {
            incarnation,
            model_fingerprint,
            arithmetic,
            connections_per_peer: 2,
            max_loads: 1024,
            max_peers: 1024,
            window_bytes: 8 << 20,
            connect_timeout: Duration::from_secs(5),
            num_connect_attempts: 3,
            tls: None,
            paths: own_paths(incarnation),
        }
    }
}
