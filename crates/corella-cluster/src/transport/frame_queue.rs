//! Small frames that wait for a connection's writer.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

use super::frame::{FRAME_BYTES, Frame};

/// The connection of a peer that does not read its answers is closed when this many frames wait.
const MAX_FRAMES: usize = 4096;

#[derive(Default)]
pub struct FrameQueue {
    bytes: Mutex<Vec<u8>>,
    /// Wakes the connection's writer when there is something for it to do.
    pub wake: Notify,
}

impl FrameQueue {
    /// False when the queue is full: the connection must end.
    #[must_use]
    pub fn push(&self, frame: &Frame) -> bool {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() >= MAX_FRAMES * FRAME_BYTES {
            return false;
        }
        bytes.extend_from_slice(&frame.encode());
        drop(bytes);
        self.wake.notify_one();
        true
    }

    /// Everything that waits; `out` lends its memory.
    pub fn take(&self, out: &mut Vec<u8>) {
        out.clear();
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *bytes, out);
    }
}
