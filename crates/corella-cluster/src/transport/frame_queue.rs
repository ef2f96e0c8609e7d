//! Small frames that wait for a connection's writer.

use std::io;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

use super::frame::Frame;

/// The limit of waiting frames. At the limit the connection is closed, because the peer does not read its answers.
const MAX_FRAMES: usize = 4096;

#[derive(Default)]
pub struct FrameQueue {
    waiting: Mutex<Waiting>,
    /// Wakes the connection's writer when the queue has a task.
    pub wake: Notify,
    overflow: Notify,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    num_frames: usize,
}

impl FrameQueue {
    pub fn push(&self, frame: &Frame) {
        self.push_bytes(&frame.encode());
    }

    /// Queues a frame and its payload. The caller has limited the payload's size.
    pub fn push_bytes(&self, frame: &[u8]) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.num_frames >= MAX_FRAMES {
            return self.overflow.notify_one();
        }
        waiting.bytes.extend_from_slice(frame);
        waiting.num_frames += 1;
        drop(waiting);
        self.wake.notify_one();
    }

    /// Waits until the queue overflows, which must end the connection.
    pub async fn overflow(&self) -> io::Error {
        self.overflow.notified().await;
        io::Error::other("the peer does not read its answers")
    }

    /// Takes all waiting bytes. `out` is a reused buffer.
    pub fn take(&self, out: &mut Vec<u8>) {
        out.clear();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.num_frames = 0;
        std::mem::swap(&mut waiting.bytes, out);
    }
}
