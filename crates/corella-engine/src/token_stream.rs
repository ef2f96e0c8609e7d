//! The stream of one request's events, from the engine's thread to the caller.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use corella_core::{AdmissionError, FinishReason, Request, RequestError, RequestId, RequestOutput};

use crate::adapter::LoadedAdapter;
use crate::command::Command;
use crate::doorbell::CommandSender;
use crate::engine::Shared;

/// The events of one request. Dropping the stream aborts the request.
pub struct TokenStream {
    id: RequestId,
    queue: Arc<EventQueue>,
    abort: Abort,
}

/// The receiver of the notice that a stream was dropped.
enum Abort {
    Engine(CommandSender),
    Relay(Option<Box<dyn FnOnce() + Send + Sync>>),
}

/// An event of a stream. The first is `Accepted` or `Refused`, the others are outputs, and the last
/// output has `finish`. If the engine is lost, a terminal output may come first.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    Accepted,
    Refused(AdmissionError),
    Output(RequestOutput),
}

impl StreamEvent {
    /// Whether this is the stream's last event.
    pub fn is_terminal(&self) -> bool {
        match self {
            Self::Accepted => false,
            Self::Refused(_) => true,
            Self::Output(output) => output.finish.is_some(),
        }
    }
}

impl TokenStream {
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event, or `None` after the terminal one. Only the waker of the latest call is woken.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<StreamEvent>> {
        let mut queue = self.queue.lock();
        if let Some(event) = queue.events.pop_front() {
            return Poll::Ready(Some(event));
        }
        if queue.ended {
            return Poll::Ready(None);
        }
        match &mut queue.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => queue.waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    pub fn next_blocking(&mut self) -> Option<StreamEvent> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut cx = Context::from_waker(&waker);
        loop {
            match self.poll_next(&mut cx) {
                Poll::Ready(event) => return event,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        let ended = {
            let mut queue = self.queue.lock();
            queue.abandoned = true;
            queue.events = VecDeque::new();
            queue.ended
        };
        if ended {
            return;
        }
        match &mut self.abort {
            // The channel has room for every live request's abort. It is closed only when the engine has stopped, and
            // then no request is left to abort.
            Abort::Engine(commands) => {
                let id = self.id;
                // The request is unknown if it has just ended.
                commands.send(Command::scheduler(move |scheduler, _| {
                    scheduler.abort_request(id);
                }));
            }
            Abort::Relay(abort) => {
                if let Some(abort) = abort.take() {
                    abort();
                }
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A stream that is not fed by an engine. `abort` is called when it is dropped before its end.
pub fn relayed_stream(
    id: RequestId,
    abort: impl FnOnce() + Send + Sync + 'static,
) -> (StreamRelay, TokenStream) {
    let queue = Arc::new(EventQueue::default());
    let stream = TokenStream {
        id,
        queue: queue.clone(),
        abort: Abort::Relay(Some(Box::new(abort))),
    };
    (StreamRelay { id, queue }, stream)
}

/// Feeds a stream. Dropped before a terminal event it ends the stream with an error.
pub struct StreamRelay {
    id: RequestId,
    queue: Arc<EventQueue>,
}

impl StreamRelay {
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// No event may follow a terminal one.
    pub fn send(&self, event: StreamEvent) {
        self.queue.push(event);
    }
}

impl Drop for StreamRelay {
    fn drop(&mut self) {
        if !self.queue.lock().ended {
            let reason = "it was given up".into();
            self.send(StreamEvent::Output(RequestOutput {
                request: self.id,
                sample: None,
                prompt_logprobs: Vec::new(),
                hidden_state: None,
                finish: Some(FinishReason::Error(RequestError::EngineLost(reason))),
                num_prompt_tokens: 0,
                num_cached_tokens: 0,
                num_output_tokens: 0,
                queue_us: 0,
            }));
        }
    }
}

/// The engine's end of a stream. Dropping it without a terminal event sends one with the reason for the engine's stop,
/// so every stream ends.
pub(crate) struct StreamSender {
    queue: Arc<EventQueue>,
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
struct EventQueue(Mutex<EventQueueState>);

#[derive(Default)]
struct EventQueueState {
    events: VecDeque<StreamEvent>,
    waker: Option<Waker>,
    /// The terminal event has been pushed.
    ended: bool,
    /// The stream has been dropped.
    abandoned: bool,
}

impl EventQueue {
    fn push(&self, event: StreamEvent) {
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

    fn lock(&self) -> std::sync::MutexGuard<'_, EventQueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes both ends of a new request's stream. The caller must have counted the request as live.
pub(crate) fn token_stream(
    request: &Request,
    commands: CommandSender,
    shared: Arc<Shared>,
) -> (StreamSender, TokenStream) {
    let queue = Arc::new(EventQueue::default());
    let stream = TokenStream {
        id: request.id,
        queue: queue.clone(),
        abort: Abort::Engine(commands),
    };
    let sender = StreamSender {
        queue,
        shared,
        last: RequestOutput {
            request: request.id,
            sample: None,
            prompt_logprobs: Vec::new(),
            hidden_state: None,
            finish: None,
            num_prompt_tokens: request.prompt.len() as u32,
            num_cached_tokens: 0,
            num_output_tokens: 0,
            queue_us: 0,
        },
        ended: false,
        adapter: None,
    };
    (sender, stream)
}

impl StreamSender {
    /// Keeps an adapter loaded until the request has ended.
    pub(crate) fn hold(&mut self, adapter: Option<Arc<LoadedAdapter>>) {
        self.adapter = adapter;
    }

    pub(crate) fn send(&mut self, event: StreamEvent) {
        if let StreamEvent::Output(output) = &event {
            self.last.num_cached_tokens = output.num_cached_tokens;
            self.last.num_output_tokens = output.num_output_tokens;
            self.last.queue_us = output.queue_us;
        }
        let terminal = event.is_terminal().then(|| event.clone());
        self.ended = terminal.is_some();
        self.queue.push(event);
        // This comes last, because a process that waits for an idle engine may exit after it.
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
