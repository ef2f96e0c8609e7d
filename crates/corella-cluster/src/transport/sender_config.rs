//! The configuration of a sender.

use std::sync::Arc;
use std::time::Duration;

use super::path_list::own_paths;
use super::row_path::RowPath;
use crate::tls::ClusterTls;

#[derive(Clone, Debug)]
pub struct SenderConfig {
    pub incarnation: u64,
    pub model_fingerprint: u128,
    pub max_connections: usize,
    pub max_loads_per_connection: usize,
    pub max_stored: usize,
    /// Loads that come before their session.
    pub max_waiting_loads: usize,
    /// A load waits no longer, whatever it asks for.
    pub max_wait: Duration,
    pub max_tombstones: usize,
    pub tombstone_time: Duration,
    /// Bytes a second that the node sends in all.
    pub max_bandwidth: Option<u64>,
    /// Bytes of one session before another has its turn; at least a page goes out.
    pub chunk_bytes: usize,
    /// A connection that takes nothing for so long is closed.
    pub stall_timeout: Duration,
    /// A connection without loads and frames is closed after it.
    pub idle_timeout: Duration,
    /// For connections from other hosts.
    pub tls: Option<ClusterTls>,
    /// By which receivers that have them, too, get rows.
    pub paths: Vec<Arc<dyn RowPath>>,
}

impl SenderConfig {
    pub fn new(incarnation: u64, model_fingerprint: u128) -> Self {
        Self {
            incarnation,
            model_fingerprint,
            max_connections: 256,
            max_loads_per_connection: 1024,
            max_stored: 4096,
            max_waiting_loads: 4096,
            max_wait: Duration::from_secs(60),
            max_tombstones: 16_384,
            tombstone_time: Duration::from_secs(60),
            max_bandwidth: None,
            // It stays in a core's cache on either side, and 256 KB cost a fifth of the speed inside a host,
            // because threads are woken for every chunk.
            chunk_bytes: 1 << 20,
            stall_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(600),
            tls: None,
            paths: own_paths(incarnation),
        }
    }
}
