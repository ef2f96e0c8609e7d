//! Keeps KV pages from being taken back while they are being copied.

use std::sync::{Mutex, PoisonError};

/// Copies are made inside the gate, in pieces that take microseconds. When `close` has returned, no copy runs and none
/// will run: the pages may be given to another request.
pub struct Gate {
    is_open: Mutex<bool>,
}

impl Gate {
    pub fn new() -> Self {
        Self {
            is_open: Mutex::new(true),
        }
    }

    /// Calls `copy` if the gate is open. Otherwise does nothing and returns `None`.
    pub fn enter<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        is_open.then(copy)
    }

    pub fn is_open(&self) -> bool {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the gate. Returns true if it was open.
    pub fn close(&self) -> bool {
        let mut is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut is_open, false)
    }
}
