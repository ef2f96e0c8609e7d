//! A connection to a sender as the loads see it that come over it.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::frame::Frame;
use super::frame_queue::FrameQueue;

/// It outlives the connection, and is closed then.
#[derive(Default)]
pub struct ReceiverQueue {
    pub frames: FrameQueue,
    loads: Mutex<Loads>,
}

#[derive(Default)]
struct Loads {
    ids: HashSet<u64>,
    is_closed: bool,
}

impl ReceiverQueue {
    fn loads(&self) -> MutexGuard<'_, Loads> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn send(&self, frame: &Frame) {
        self.frames.push(frame);
    }

    /// False when the connection is lost.
    pub fn add_load(&self, load_id: u64) -> bool {
        let mut loads = self.loads();
        if !loads.is_closed {
            loads.ids.insert(load_id);
        }
        !loads.is_closed
    }

    pub fn remove_load(&self, load_id: u64) {
        self.loads().ids.remove(&load_id);
    }

    pub fn has(&self, load_id: u64) -> bool {
        self.loads().ids.contains(&load_id)
    }

    pub fn is_closed(&self) -> bool {
        self.loads().is_closed
    }

    /// The connection is lost. Returns the loads that it had.
    pub fn close(&self) -> HashSet<u64> {
        let mut loads = self.loads();
        loads.is_closed = true;
        std::mem::take(&mut loads.ids)
    }
}
