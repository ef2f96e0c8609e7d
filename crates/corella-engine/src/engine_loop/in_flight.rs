//! The steps in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::{Batch, RequestId, SlotId};

use crate::state::shared::Shared;
use crate::state::watchdog::{Watchdog, WatchedStep};

/// Steps that were submitted and have not returned, oldest first.
pub(crate) struct InFlight {
    steps: VecDeque<InFlightStep>,
    /// The request that holds each slot, according to the batches so far.
    slot_requests: Vec<RequestId>,
    oldest_since: Instant,
    watchdog: Watchdog,
    shared: Arc<Shared>,
}

pub(super) struct InFlightStep {
    pub(super) batch: Arc<Batch>,
    requests: Arc<[RequestId]>,
    /// The reason, if the step failed at submission. The failure is reported when the step is the oldest.
    pub(super) failure: Option<String>,
}

impl InFlight {
    pub(crate) fn new(watchdog: Watchdog, shared: Arc<Shared>) -> Self {
        Self {
            steps: VecDeque::new(),
            slot_requests: Vec::new(),
            oldest_since: Instant::now(),
            watchdog,
            shared,
        }
    }

    /// The request in a slot, according to the newest batch.
    pub(super) fn request_of(&self, slot: SlotId) -> RequestId {
        self.slot_requests[slot.0 as usize]
    }

    pub(super) fn oldest(&mut self) -> Option<&mut InFlightStep> {
        self.steps.front_mut()
    }

    pub(super) fn push(&mut self, batch: Arc<Batch>) {
        for start in &batch.started {
            let slot = start.slot.0 as usize;
            if self.slot_requests.len() <= slot {
                self.slot_requests.resize(slot + 1, RequestId::default());
            }
            self.slot_requests[slot] = start.request;
        }
        let requests = batch
            .spans
            .iter()
            .map(|span| self.slot_requests[span.slot.0 as usize])
            .collect();
        self.steps.push_back(InFlightStep {
            batch,
            requests,
            failure: None,
        });
        if self.steps.len() == 1 {
            self.watch_oldest();
        }
    }

    pub(super) fn fail_newest(&mut self, reason: String) {
        if let Some(newest) = self.steps.back_mut() {
            newest.failure = Some(reason);
        }
    }

    /// Removes the oldest step, which has returned. Returns its batch and its duration.
    pub(super) fn pop(&mut self) -> Option<(Arc<Batch>, Duration)> {
        let oldest = self.steps.pop_front();
        let step_time = self.oldest_since.elapsed();
        let mut inner = self.shared.lock();
        inner.stats.num_steps += 1;
        if let Some(step) = &oldest {
            inner.stats.step_tokens.add(step.batch.num_tokens());
        }
        inner.stats.step_time += step_time;
        drop(inner);
        self.watch_oldest();
        oldest.map(|step| (step.batch, step_time))
    }

    fn watch_oldest(&mut self) {
        self.oldest_since = Instant::now();
        self.watchdog
            .watch(self.steps.front().map(|step| WatchedStep {
                batch: step.batch.clone(),
                requests: step.requests.clone(),
                since: self.oldest_since,
            }));
    }
}
