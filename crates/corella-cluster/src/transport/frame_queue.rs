//! Small frames that wait for a connection's writer.

use std::io;
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
    overflow: Notify,
}

impl FrameQueue {
    pub fn push(&self, frame: &Frame) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() >= MAX_FRAMES * FRAME_BYTES {
            return self.overflow.notify_one();
        }
        bytes.extend_from_slice(&frame.encode());
        drop(bytes);
        self.wake.notify_one();
    }

    /// Waits until a frame had no room: the connection must end.
    pub async fn overflow(&self) -> io::Error {
        self.overflow.notified().await;
        io::Error::other("the peer does not read its answers")
    }

    /// Everything that waits; `out` lends its memory.
    pub fn take(&self, out: &mut Vec<u8>) {
        out.clear();
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *bytes, out);
    }
}
