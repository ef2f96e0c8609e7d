//! The configuration of a sender.

use std::sync::Arc;
use std::time::Duration;

use corella_core::Arithmetic;

use super::path::own_paths;
use super::row_path::RowPath;
use crate::tls::ClusterTls;

#[derive(Clone, Debug)]
pub struct SenderConfig {
    pub incarnation: u64,
    pub model_fingerprint: u128,
    /// The properties that decide the bits of this node's rows.
    pub arithmetic: Arithmetic,
    pub max_connections: usize,
    pub max_loads_per_connection: usize,
    pub max_exported: usize,
    /// The limit of loads that arrive before their session.
    pub max_waiting_loads: usize,
    /// The limit of a load's wait, even if the load asks for a longer one.
    pub max_wait: Duration,
    pub max_tombstones: usize,
    pub tombstone_time: Duration,
    /// The limit of bytes per second over all connections.
    pub max_bandwidth: Option<u64>,
    /// The number of bytes of one session before the next session's turn. A single page may be larger.
    pub chunk_bytes: usize,
    /// A connection whose peer takes no bytes for this long is closed.
    pub stall_timeout: Duration,
    /// A connection without loads and frames is closed after this time.
    pub idle_timeout: Duration,
    /// Used for connections from other hosts.
    pub tls: Option<ClusterTls>,
    /// The row paths offered to receivers that also have them.
    pub paths: Vec<Arc<dyn RowPath>>,
}

impl SenderConfig {
    pub fn new(incarnation: u64, model_fingerprint: u128, arithmetic: Arithmetic) -> Self {
        Self {
            incarnation,
            model_fingerprint,
            arithmetic,
            max_connections: 256,
            max_loads_per_connection: 1024,
            max_exported: 4096,
            max_waiting_loads: 4096,
            max_wait: Duration::from_secs(60),
            max_tombstones: 16_384,
            tombstone_time: Duration::from_secs(60),
            max_bandwidth: None,
            // A chunk of this size stays in a core's cache at both ends. Chunks of 256 KB cost a fifth of the speed
            // inside a host, because threads are woken for every chunk.
            chunk_bytes: 1 << 20,
            stall_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(600),
            tls: None,
            paths: own_paths(incarnation),
        }
    }
}
