//! The stream of one request's events, from the engine's thread to the caller.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use corella_core::{FinishReason, Request, RequestError, RequestId, RequestOutput};

use crate::request::command::{Command, CommandSender};
use crate::request::stream_sender::{EventQueue, StreamSender};
use crate::state::shared::Shared;
use crate::state::stream_event::StreamEvent;

/// The events of one request. Dropping the stream aborts the request.
pub struct TokenStream {
    id: RequestId,
    queue: Arc<EventQueue>,
    abort: Abort,
}

/// The receiver of the notice that a stream was dropped before its end.
enum Abort {
    Engine(CommandSender),
    Relay(Option<Box<dyn FnOnce() + Send + Sync>>),
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

/// Makes both ends of a new request's stream. The caller must have counted the request as live.
pub(crate) fn token_stream(
    request: &Request,
    commands: CommandSender,
    shared: Arc<Shared>,
) -> (StreamSender, TokenStream) {
    let sender = StreamSender::new(request, shared);
    let stream = TokenStream {
        id: request.id,
        queue: sender.queue.clone(),
        abort: Abort::Engine(commands),
    };
    (sender, stream)
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

/// Feeds a stream. If the relay is dropped before a terminal event, the stream ends with an error.
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
                finish: Some(FinishReason::Error(RequestError::EngineLost(reason))),
                ..RequestOutput::default()
            }));
        }
    }
}
