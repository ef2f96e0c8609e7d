//! The state that callers and the loop share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corella_core::{AdmissionError, FinishReason, SchedulerConfig};

use crate::state::engine_error::SubmitError;
use crate::state::engine_stats::EngineStats;
use crate::state::stream_event::StreamEvent;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    Ready,
    /// Requests still finish; new ones are refused.
    Draining,
    /// The engine has stopped, for this reason.
    Lost(String),
}

impl EngineState {
    /// Refuses new submissions unless the engine is ready.
    pub fn check(&self) -> Result<(), SubmitError> {
        match self {
            Self::Ready => Ok(()),
            Self::Draining => Err(SubmitError::Draining),
            Self::Lost(reason) => Err(SubmitError::Lost(reason.clone())),
        }
    }
}

/// A node's commitment to a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No commitment yet.
    New,
    /// The node took the request before the node drained. Limits of the queue may still refuse it.
    Taken,
    /// An engine of this node accepted the request before, and it comes back: neither draining nor limits of the queue
    /// refuse it.
    Accepted,
}

/// State that callers and the loop share. It is locked once for each request and each step, not for each token.
pub(crate) struct Shared {
    epoch: Instant,
    next_id: AtomicU64,
    max_live_requests: usize,
    limits: SchedulerConfig,
    inner: Mutex<Inner>,
    changed: Condvar,
}

pub(crate) struct Inner {
    pub(crate) state: EngineState,
    pub(crate) stats: EngineStats,
    /// Whether the engine's thread has ended.
    pub(crate) stopped: bool,
}

impl Shared {
    pub(crate) fn new(limits: SchedulerConfig, max_live_requests: usize) -> Self {
        Self {
            epoch: Instant::now(),
            next_id: AtomicU64::new(0),
            max_live_requests,
            limits,
            inner: Mutex::new(Inner {
                state: EngineState::Ready,
                stats: EngineStats::default(),
                stopped: false,
            }),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `is_awaited` holds, but no longer than `timeout`. Returns whether it still holds.
    pub(crate) fn wait_while(
        &self,
        timeout: Duration,
        is_awaited: impl Fn(&Inner) -> bool,
    ) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |inner| is_awaited(inner));
        let (_inner, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        waited.timed_out()
    }

    pub(crate) fn limits(&self) -> &SchedulerConfig {
        &self.limits
    }

    /// Time since the engine started.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.now().as_micros() as u64
    }

    /// Reports that the engine's thread has ended.
    pub(crate) fn handle_stopped(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Declares the engine lost. A hung step keeps running unseen, so the owner of the process should end it.
    pub(crate) fn give_up(&self, reason: String) {
        self.lock().state = EngineState::Lost(reason);
        self.changed.notify_all();
    }

    pub(crate) fn take_ids(&self, num_ids: u32) -> u64 {
        self.next_id.fetch_add(num_ids.into(), Ordering::Relaxed)
    }

    /// Counts requests as live. The scheduler limits the queue. The limit here is higher than the scheduler's, and only
    /// bounds the command channel. Accepted requests are bounded by the limit of sessions instead.
    pub(crate) fn count_live(&self, num_choices: u32, entry: Entry) -> Result<(), SubmitError> {
        let mut inner = self.lock();
        let is_taken = inner.state == EngineState::Draining && entry != Entry::New;
        if !is_taken {
            inner.state.check()?;
        }
        let num_live = inner.stats.num_live_requests + num_choices as usize;
        if num_live > self.max_live_requests && entry != Entry::Accepted {
            return Err(SubmitError::Refused(AdmissionError::QueueFull {
                num_waiting: inner.stats.scheduler.num_waiting,
                limit: self.limits.max_queued_requests,
            }));
        }
        inner.stats.num_live_requests = num_live;
        Ok(())
    }

    pub(crate) fn handle_request_end(&self, event: &StreamEvent) {
        let mut inner = self.lock();
        let stats = &mut inner.stats;
        stats.num_live_requests -= 1;
        match event {
            StreamEvent::Accepted => {}
            StreamEvent::Refused(_) => stats.num_refused += 1,
            StreamEvent::Output(output) => match output.finish {
                Some(FinishReason::EndToken | FinishReason::StopToken) => {
                    stats.num_finished_stop += 1;
                }
                Some(FinishReason::Length) => stats.num_finished_length += 1,
                Some(FinishReason::Aborted) => stats.num_finished_abort += 1,
                Some(FinishReason::Error(_)) => stats.num_finished_error += 1,
                None => {}
            },
        }
        if stats.num_live_requests == 0 {
            self.changed.notify_all();
        }
    }

    pub(crate) fn lost_reason(&self) -> String {
        match &self.lock().state {
            EngineState::Lost(reason) => reason.clone(),
            EngineState::Ready | EngineState::Draining => "the engine has stopped".to_owned(),
        }
    }
}
