//! The loads of a connection, and the queue of its writer.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use corella_core::session::SessionKey;

use super::bandwidth_meter::BandwidthMeter;
use super::frame::Frame;
use super::frame_queue::FrameQueue;

/// Tells a sender's connections apart, because loads of different connections may have the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId(pub u64);

/// The tasks of a connection's writer. The queue may outlive the connection, and is closed when the connection ends.
pub struct ConnectionQueue {
    pub id: ConnectionId,
    pub frames: FrameQueue,
    max_loads: usize,
    loads: Mutex<Loads>,
    /// Measures the bandwidth at which the other end takes rows. Receivers measure nothing.
    meter: Arc<Mutex<BandwidthMeter>>,
}

#[derive(Default)]
struct Loads {
    /// The requested sessions, by load id.
    by_id: HashMap<u64, SessionKey>,
    /// Loads with rows to send. Each load is in the queue at most once, and the loads take turns.
    ready: VecDeque<u64>,
    is_closed: bool,
}

impl ConnectionQueue {
    pub fn new(id: ConnectionId, max_loads: usize, meter: Arc<Mutex<BandwidthMeter>>) -> Self {
        Self {
            id,
            frames: FrameQueue::default(),
            max_loads,
            loads: Mutex::default(),
            meter,
        }
    }

    pub fn meter(&self) -> MutexGuard<'_, BandwidthMeter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn loads(&self) -> MutexGuard<'_, Loads> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn send(&self, frame: &Frame) {
        self.frames.push(frame);
    }

    /// Returns false when the connection is lost, or has the maximum of loads.
    pub fn add_load(&self, load_id: u64, key: SessionKey) -> bool {
        let mut loads = self.loads();
        let has_room = !loads.is_closed && loads.by_id.len() < self.max_loads;
        if has_room {
            loads.by_id.insert(load_id, key);
        }
        has_room
    }

    pub fn remove_load(&self, load_id: u64) {
        let mut loads = self.loads();
        loads.by_id.remove(&load_id);
        loads.ready.retain(|&other| other != load_id);
    }

    /// Returns the session that a load asks for.
    pub fn key_of(&self, load_id: u64) -> Option<SessionKey> {
        self.loads().by_id.get(&load_id).copied()
    }

    pub fn is_full(&self) -> bool {
        self.loads().by_id.len() >= self.max_loads
    }

    pub fn is_empty(&self) -> bool {
        self.loads().by_id.is_empty()
    }

    pub fn is_closed(&self) -> bool {
        self.loads().is_closed
    }

    /// Queues a load for the writer.
    pub fn queue(&self, load_id: u64) {
        self.loads().ready.push_back(load_id);
        self.frames.wake.notify_one();
    }

    /// Queues a load again after the writer has served it.
    pub fn requeue(&self, load_id: u64) {
        let mut loads = self.loads();
        if loads.by_id.contains_key(&load_id) {
            loads.ready.push_back(load_id);
        }
    }

    pub fn next_ready(&self) -> Option<(u64, SessionKey)> {
        let mut loads = self.loads();
        while let Some(load_id) = loads.ready.pop_front() {
            if let Some(key) = loads.by_id.get(&load_id) {
                return Some((load_id, *key));
            }
        }
        None
    }

    /// Closes the queue when the connection is lost. Returns the connection's loads.
    pub fn close(&self) -> HashMap<u64, SessionKey> {
        let mut loads = self.loads();
        loads.is_closed = true;
        loads.ready.clear();
        let by_id = std::mem::take(&mut loads.by_id);
        drop(loads);
        self.frames.wake.notify_one();
        by_id
    }
}
