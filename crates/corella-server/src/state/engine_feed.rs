//! The newest snapshot of the engine, for all readers of `/engine/events`.

use std::sync::{Mutex, PoisonError};

use axum::body::Bytes;
use tokio::sync::watch;

use crate::call::recent_latency::RecentLatency;

/// The newest snapshot, encoded, and whether a task makes further ones.
#[derive(Default)]
pub struct EngineFeed {
    newest: watch::Sender<Bytes>,
    is_running: Mutex<bool>,
}

impl EngineFeed {
    /// Adds a reader. For the first reader, `start` begins a task that makes snapshots.
    pub fn subscribe(
        &self,
        recent: &RecentLatency,
        start: impl FnOnce(),
    ) -> watch::Receiver<Bytes> {
        let mut is_running = self
            .is_running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let reader = self.newest.subscribe();
        if !*is_running {
            *is_running = true;
            recent.set_watched(true);
            start();
        }
        reader
    }

    pub fn publish(&self, snapshot: Bytes) {
        self.newest.send_replace(snapshot);
    }

    /// Returns whether no reader is left. The calling task must then end, because the next reader starts another task.
    pub fn try_stop(&self, recent: &RecentLatency) -> bool {
        let mut is_running = self
            .is_running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *is_running = self.newest.receiver_count() > 0;
        if !*is_running {
            recent.set_watched(false);
        }
        !*is_running
    }
}
