//! State that all connections of a sender share: the exported sessions and the bandwidth.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;
use tokio::sync::{Notify, Semaphore};

use super::Hello;
use super::bandwidth_meter::BandwidthMeter;
use super::block_server::BlockServer;
use super::connection_queue::{ConnectionId, ConnectionQueue};
use super::frame::MAX_PAYLOAD_BYTES;
use super::outgoing::Outgoing;
use super::path_name::PathName;
use super::row_path::{Offer, RowPath};
use super::sender_config::SenderConfig;
use super::timed_exports::TimedExports;
use super::token_bucket::TokenBucket;

/// The limit of a chunk's sending time under a limited bandwidth, so that the connection's other frames need not wait.
const CHUNK_TIME: f64 = 0.02;
/// The limit of peers whose bandwidth is remembered.
const MAX_METERS: usize = 1024;

pub struct SenderState {
    pub config: SenderConfig,
    pub chunk_bytes: usize,
    pub deadlines_changed: Notify,
    pub hello: Hello,
    /// The row paths by which receivers can read this node's pages.
    pub offers: Vec<(Arc<dyn RowPath>, Offer)>,
    table: Mutex<TimedExports>,
    bucket: Option<Mutex<TokenBucket>>,
    meters: Mutex<HashMap<u64, Arc<Mutex<BandwidthMeter>>>>,
    pub connections: Arc<Semaphore>,
    next_connection: AtomicU64,
    pub num_refused_connections: AtomicU64,
    pub num_bytes_sent: AtomicU64,
    /// Serves loads of cached blocks, if the node does so.
    pub blocks: OnceLock<Arc<dyn BlockServer>>,
}

impl SenderState {
    pub fn new(config: SenderConfig, hello: Hello, offers: Vec<(Arc<dyn RowPath>, Offer)>) -> Self {
        let bucket = config.max_bandwidth.map(|bytes_per_s| {
            let bucket = TokenBucket::new(bytes_per_s.max(1), Instant::now());
            Mutex::new(bucket)
        });
        let most = config.chunk_bytes.min(MAX_PAYLOAD_BYTES);
        let chunk_bytes = match config.max_bandwidth {
            Some(bytes_per_s) => most.min((bytes_per_s as f64 * CHUNK_TIME) as usize),
            None => most,
        };
        Self {
            chunk_bytes,
            deadlines_changed: Notify::new(),
            hello,
            offers,
            table: Mutex::new(TimedExports::new(&config)),
            bucket,
            meters: Mutex::default(),
            connections: Arc::new(Semaphore::new(config.max_connections)),
            next_connection: AtomicU64::new(0),
            num_refused_connections: AtomicU64::new(0),
            num_bytes_sent: AtomicU64::new(0),
            blocks: OnceLock::new(),
            config,
        }
    }

    pub fn table(&self) -> MutexGuard<'_, TimedExports> {
        lock(&self.table)
    }

    pub fn exported(&self, key: &SessionKey) -> Option<Arc<Outgoing>> {
        self.table().get(key).cloned()
    }

    pub fn meters(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mutex<BandwidthMeter>>>> {
        lock(&self.meters)
    }

    pub fn offer(&self, name: PathName) -> Option<&(Arc<dyn RowPath>, Offer)> {
        self.offers.iter().find(|(path, _)| path.name() == name)
    }

    /// Takes bytes from the bandwidth limit, and returns the time to wait before sending the bytes.
    pub fn take_bandwidth(&self, num_bytes: usize) -> Duration {
        self.num_bytes_sent
            .fetch_add(num_bytes as u64, Ordering::Relaxed);
        match &self.bucket {
            Some(bucket) => lock(bucket).take(num_bytes, Instant::now()),
            None => Duration::ZERO,
        }
    }

    /// Returns the queue of a new connection of this receiver.
    pub fn new_queue(&self, peer_incarnation: u64) -> ConnectionQueue {
        let mut meters = self.meters();
        if meters.len() >= MAX_METERS {
            // The meter of a connected peer has a second owner.
            meters.retain(|_, meter| Arc::strong_count(meter) > 1);
        }
        let meter = meters.entry(peer_incarnation).or_default().clone();
        let id = ConnectionId(self.next_connection.fetch_add(1, Ordering::Relaxed));
        ConnectionQueue::new(id, self.config.max_loads_per_connection, meter)
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
