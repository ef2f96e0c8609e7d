//! Holds the mock's steps, so that a test can act while one is in flight.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::StepWaker;

/// A gate that steps pass one by one when they return. The gate holds back only a step's output, and does not delay
/// other parts of a step. A new gate is open, and clones are the same gate.
#[derive(Clone, Default)]
pub struct StepGate(Arc<Gate>);

#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of steps that may pass; `None` while the gate is open.
    num_free: Option<u64>,
    wakers: Vec<StepWaker>,
}

impl StepGate {
    /// Closes the gate: from now on every step is held.
    pub fn close(&self) {
        self.lock().num_free = Some(0);
    }

    /// Lets `num_steps` further steps pass.
    pub fn let_through(&self, num_steps: u64) {
        self.change(|num_free| *num_free = num_free.map(|free| free + num_steps));
    }

    /// Opens the gate: from now on no step is held.
    pub fn open(&self) {
        self.change(|num_free| *num_free = None);
    }

    pub(super) fn try_pass(&self) -> bool {
        match &mut self.lock().num_free {
            None => true,
            Some(0) => false,
            Some(num_free) => {
                *num_free -= 1;
                true
            }
        }
    }

    pub(super) fn pass(&self) {
        while !self.try_pass() {
            let is_shut = |state: &mut State| state.num_free == Some(0);
            drop(self.0.opened.wait_while(self.lock(), is_shut));
        }
    }

    /// Adds a waker that is called whenever a held step may pass.
    pub(super) fn add_waker(&self, waker: StepWaker) {
        self.lock().wakers.push(waker);
    }

    fn change(&self, change: impl FnOnce(&mut Option<u64>)) {
        let mut state = self.lock();
        change(&mut state.num_free);
        self.0.opened.notify_all();
        state.wakers.iter().for_each(|waker| waker());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for StepGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let num_free = self.lock().num_free;
        f.debug_struct("StepGate")
            .field("num_free", &num_free)
            .finish()
    }
}
