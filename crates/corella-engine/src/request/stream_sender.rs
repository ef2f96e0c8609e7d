//! The engine's end of a stream, and the queue between both ends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use corella_core::{FinishReason, Request, RequestError, RequestOutput};

use crate::adapter::LoadedAdapter;
use crate::state::shared::Shared;
use crate::state::stream_event::StreamEvent;

/// The engine's end of a stream. Dropping it without a terminal event sends one with the reason for the engine's stop,
/// so every stream ends.
pub(crate) struct StreamSender {
    pub(super) queue: Arc<EventQueue>,
    shared: Arc<Shared>,
    /// The counters of the last output, for a terminal event that does not come from the scheduler.
    last: RequestOutput,
    ended: bool,
    /// The request's adapter, which the executor keeps until the request has ended.
    adapter: Option<Arc<LoadedAdapter>>,
}

/// The queue of events between the two ends of a stream. It is locked for one push or one pop at a time, by at most two
/// threads. Its length is at most the request's `max_tokens` + 2, plus one for a hidden state or for each chunk of a
/// prompt whose log-probabilities are wanted, because the scheduler emits no more events.
#[derive(Default)]
pub(super) struct EventQueue(Mutex<EventQueueState>);

#[derive(Default)]
pub(super) struct EventQueueState {
    pub(super) events: VecDeque<StreamEvent>,
    pub(super) waker: Option<Waker>,
    /// The terminal event has been pushed.
    pub(super) ended: bool,
    /// The stream has been dropped.
    pub(super) abandoned: bool,
}

impl EventQueue {
    pub(super) fn push(&self, event: StreamEvent) {
        let waker = {
            let mut queue = self.lock();
            queue.ended = event.is_terminal();
            if !queue.abandoned {
                queue.events.push_back(event);
            }
            queue.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, EventQueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamSender {
    pub(super) fn new(request: &Request, shared: Arc<Shared>) -> Self {
        Self {
            queue: Arc::default(),
            shared,
            last: RequestOutput {
                request: request.id,
                num_prompt_tokens: request.prompt.len() as u32,
                ..RequestOutput::default()
            },
            ended: false,
            adapter: None,
        }
    }

    /// Keeps an adapter loaded until the request has ended.
    pub(crate) fn hold(&mut self, adapter: Option<Arc<LoadedAdapter>>) {
        self.adapter = adapter;
    }

    pub(crate) fn send(&mut self, event: StreamEvent) {
        if let StreamEvent::Output(output) = &event {
            self.last.cache_use = output.cache_use;
            self.last.num_output_tokens = output.num_output_tokens;
            self.last.queue_us = output.queue_us;
        }
        let terminal = event.is_terminal().then(|| event.clone());
        self.ended = terminal.is_some();
        self.queue.push(event);
        // This call comes last, because a process that waits for an idle engine may exit after it.
        if let Some(event) = terminal {
            self.shared.handle_request_end(&event);
        }
    }
}

impl Drop for StreamSender {
    fn drop(&mut self) {
        if !self.ended {
            let mut output = self.last.clone();
            let reason = self.shared.lost_reason();
            output.finish = Some(FinishReason::Error(RequestError::EngineLost(
                reason.into_boxed_str(),
            )));
            self.send(StreamEvent::Output(output));
        }
    }
}
