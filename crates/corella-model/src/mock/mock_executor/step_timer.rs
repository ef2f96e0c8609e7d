//! Wakes the mock's caller when a step's time is over.

use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use crate::StepWaker;

/// A thread that ends when this value is dropped.
pub(super) struct StepTimer(Sender<Instant>);

impl StepTimer {
    pub fn start(waker: StepWaker) -> Self {
        let (sender, times) = channel::<Instant>();
        std::thread::spawn(move || {
            for time in times {
                std::thread::sleep(time.saturating_duration_since(Instant::now()));
                waker();
            }
        });
        Self(sender)
    }

    /// Wakes the caller at `time`. Calls come in the order of their times, because steps end in order.
    pub fn wake_at(&self, time: Instant) {
        // The thread lives as long as the timer.
        let _ = self.0.send(time);
    }
}
