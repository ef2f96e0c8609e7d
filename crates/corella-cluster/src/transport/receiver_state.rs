//! What all connections of a receiver share: its peers, and the loads that run.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::incoming::{Incoming, LoadFailure};
use super::path_name::PathName;
use super::peer::{Peer, SlotGuard};
use super::{Hello, PeerAddress, ReceiverConfig};

pub struct ReceiverState {
    pub config: ReceiverConfig,
    pub hello: Hello,
    pub num_unknown_frames: AtomicU64,
    pub num_corrupt_frames: AtomicU64,
    path_bytes: Mutex<HashMap<PathName, u64>>,
    pub stopped: watch::Sender<bool>,
    pub next_load_id: AtomicU64,
    peers: Mutex<HashMap<PeerAddress, Arc<Peer>>>,
    loads: Mutex<HashMap<u64, Arc<Incoming>>>,
}

impl ReceiverState {
    pub fn new(config: ReceiverConfig, hello: Hello) -> Self {
        Self {
            config,
            hello,
            num_unknown_frames: AtomicU64::new(0),
            num_corrupt_frames: AtomicU64::new(0),
            path_bytes: Mutex::default(),
            stopped: watch::Sender::new(false),
            next_load_id: AtomicU64::new(1),
            peers: Mutex::default(),
            loads: Mutex::default(),
        }
    }

    pub fn loads(&self) -> MutexGuard<'_, HashMap<u64, Arc<Incoming>>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn peers(&self) -> MutexGuard<'_, HashMap<PeerAddress, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts bytes of pages that were read from a sender's memory.
    pub fn count_read(&self, path: PathName, num_bytes: u64) {
        *self.path_bytes().entry(path).or_default() += num_bytes;
    }

    pub fn num_bytes_by(&self, path: PathName) -> u64 {
        self.path_bytes().get(&path).copied().unwrap_or_default()
    }

    fn path_bytes(&self) -> MutexGuard<'_, HashMap<PathName, u64>> {
        self.path_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn remove_load(&self, load_id: u64) {
        self.loads().remove(&load_id);
    }

    pub fn peer(&self, address: &PeerAddress) -> Option<Arc<Peer>> {
        let mut peers = self.peers();
        if !peers.contains_key(address) && peers.len() >= self.config.max_peers {
            peers.retain(|_, peer| !peer.is_idle());
            if peers.len() >= self.config.max_peers {
                return None;
            }
        }
        let num_connections = self.config.connections_per_peer;
        let first_index = peers.len() * num_connections;
        let make = || Arc::new(Peer::new(address.clone(), first_index, num_connections));
        Some(peers.entry(address.clone()).or_insert_with(make).clone())
    }

    /// Runs a load. An idle connection may have ended unnoticed, so a load that received nothing is tried once more.
    pub async fn run(self: &Arc<Self>, load: &Arc<Incoming>, slot: SlotGuard) {
        for _ in 0..2 {
            match slot.connection(self).await {
                Ok(connection) => load.open(&connection, self.config.window_bytes),
                Err(failure) => return load.fail(failure),
            }
            load.lost.notified().await;
        }
        load.fail(LoadFailure::ConnectionLost);
    }
}
