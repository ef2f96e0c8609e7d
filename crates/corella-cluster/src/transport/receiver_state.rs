//! State that all connections of a receiver share: its configuration, running loads and counters.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;

use super::Hello;
use super::block_client::BlockClient;
use super::incoming::{Incoming, LoadTable};
use super::path_name::PathName;
use super::receiver_config::ReceiverConfig;

pub struct ReceiverState {
    pub config: ReceiverConfig,
    pub hello: Hello,
    pub num_unknown_frames: AtomicU64,
    pub num_corrupt_frames: AtomicU64,
    path_bytes: Mutex<HashMap<PathName, u64>>,
    pub stopped: watch::Sender<bool>,
    pub next_load_id: AtomicU64,
    pub loads: Arc<LoadTable>,
    pub block_client: OnceLock<Box<dyn BlockClient>>,
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
            loads: Arc::default(),
            block_client: OnceLock::new(),
        }
    }

    pub fn loads(&self) -> MutexGuard<'_, HashMap<u64, Arc<Incoming>>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts bytes of pages read from a sender's memory.
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
}
