//! The progress of a step, for threads that read pages of its finished layers.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use corella_core::StepId;

use crate::LayerProgress;

/// One number that an executor, or a stage of its pipeline, advances when the keys and values of a
/// layer have been stored. It only grows, because steps run in the order of their ids.
///
/// A thread that sees a counted layer also sees all earlier writes of the counting thread, and of each thread that
/// has met the counting thread at a barrier before.
#[derive(Default)]
pub struct LayerCounter {
    /// The step, and below it the number of finished layers, or `OVER`.
    state: AtomicU64,
    num_waiting: AtomicU32,
    mutex: Mutex<()>,
    condvar: Condvar,
}

const COUNT_BITS: u32 = 16;
/// A number of layers that no model has.
const OVER: u64 = (1 << COUNT_BITS) - 1;

impl LayerCounter {
    /// Records that the first `num_layers` layers of the step are finished. The caller changes them no more until the
    /// step returns.
    pub fn advance(&self, step: StepId, num_layers: usize) {
        self.set(step.0 << COUNT_BITS | num_layers as u64);
    }

    /// Records that the step has failed, or stores no further rows.
    pub fn finish(&self, step: StepId) {
        self.set(step.0 << COUNT_BITS | OVER);
    }

    /// Ends all waits, because no further steps follow.
    pub fn close(&self) {
        self.set(u64::MAX);
    }

    /// The number of the step's finished layers; `None` when the step is over.
    pub fn num_done(&self, step: StepId) -> Option<usize> {
        // This load is ordered after the store in `set` and, in a waiter, after the waiter has counted itself.
        let state = self.state.load(Ordering::SeqCst);
        let count = state & OVER;
        match step.0.cmp(&(state >> COUNT_BITS)) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => (count != OVER).then_some(count as usize),
            std::cmp::Ordering::Greater => Some(0),
        }
    }

    pub fn wait(&self, step: StepId, layer: usize, timeout: Duration) -> LayerProgress {
        let progress = || match self.num_done(step) {
            None => Some(LayerProgress::StepOver),
            Some(num_done) if num_done > layer => Some(LayerProgress::Ready),
            Some(_) => None,
        };
        if let Some(progress) = progress() {
            return progress;
        }
        let asked_at = Instant::now();
        let mut guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.num_waiting.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            if let Some(progress) = progress() {
                break progress;
            }
            let left = timeout.saturating_sub(asked_at.elapsed());
            if left.is_zero() {
                break LayerProgress::TimedOut;
            }
            let waited = self.condvar.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        self.num_waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// A waiter counts itself before it reads the state, and this function looks for waiters after it has written the
    /// state, so that the waiter sees the new state, or this function sees the waiter.
    fn set(&self, state: u64) {
        self.state.store(state, Ordering::SeqCst);
        if self.num_waiting.load(Ordering::SeqCst) > 0 {
            let _guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
            self.condvar.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use corella_test::wait_until;

    use super::*;

    #[test]
    fn layers_are_ready_one_by_one_and_a_later_step_ends_the_wait() {
        let counter = LayerCounter::default();
        let wait = |step, layer| counter.wait(StepId(step), layer, Duration::ZERO);
        counter.advance(StepId(5), 2);
        assert_eq!(counter.num_done(StepId(5)), Some(2));
        assert_eq!(wait(5, 0), LayerProgress::Ready);
        assert_eq!(wait(5, 1), LayerProgress::Ready);
        assert_eq!(wait(5, 2), LayerProgress::TimedOut);
        assert_eq!(wait(4, 2), LayerProgress::StepOver);
        assert_eq!(wait(6, 0), LayerProgress::TimedOut);
        counter.finish(StepId(5));
        assert_eq!(counter.num_done(StepId(5)), None);
        assert_eq!(wait(5, 2), LayerProgress::StepOver);
        assert_eq!(wait(6, 0), LayerProgress::TimedOut);
        counter.close();
        assert_eq!(wait(6, 0), LayerProgress::StepOver);
    }

    /// Closes the counter when dropped. Otherwise a failing test would wait for its waiting threads for ever.
    struct Closes<'a>(&'a LayerCounter);

    impl Drop for Closes<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }

    /// No later event wakes a waiter that has missed its layer, because the next layer is counted only after all
    /// waiters have seen this layer.
    #[test]
    fn no_wake_up_is_lost_and_what_was_stored_before_is_seen() {
        for num_waiting in [1, 2] {
            wake(num_waiting);
        }
    }

    fn wake(num_waiting: usize) {
        const NUM_STEPS: u64 = 300;
        const NUM_LAYERS: usize = 5;
        /// The number of polls without a pause. They let the counting thread continue soon after the last waiter.
        const NUM_EAGER_LOOKS: usize = 1000;
        let counter = LayerCounter::default();
        let stored = [const { AtomicUsize::new(0) }; NUM_LAYERS];
        let num_seen = AtomicUsize::new(0);
        let steps = || (1..=NUM_STEPS).flat_map(|step| (0..NUM_LAYERS).map(move |at| (step, at)));
        std::thread::scope(|scope| {
            let _closes = Closes(&counter);
            for _ in 0..num_waiting {
                scope.spawn(|| {
                    for (step, layer) in steps() {
                        let progress = counter.wait(StepId(step), layer, Duration::MAX);
                        let is_seen = stored[layer].load(Ordering::Relaxed) as u64 == step;
                        if progress != LayerProgress::Ready || !is_seen {
                            // This ends the waits of the other threads, too.
                            counter.close();
                            return;
                        }
                        num_seen.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for (round, (step, layer)) in steps().enumerate() {
                stored[layer].store(step as usize, Ordering::Relaxed);
                counter.advance(StepId(step), layer + 1);
                let have_all_seen = || {
                    let num_done = counter.num_done(StepId(step));
                    assert_eq!(num_done, Some(layer + 1), "a waiter has given up");
                    num_seen.load(Ordering::SeqCst) == (round + 1) * num_waiting
                };
                let mut eager_looks = 0..NUM_EAGER_LOOKS;
                while !have_all_seen() && eager_looks.next().is_some() {
                    std::thread::yield_now();
                }
                wait_until("every waiter sees the layer", have_all_seen);
            }
        });
    }
}
