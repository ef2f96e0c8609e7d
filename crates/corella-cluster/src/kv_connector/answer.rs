//! Streams that callers get before their request is submitted to the engine.

use std::future::poll_fn;

use corella_core::{FinishReason, RequestError, RequestId, RequestOutput};
use corella_engine::{StreamEvent, StreamRelay, SubmitError, TokenStream, relayed_stream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A choice's stream, as its reader receives it.
pub struct Answer {
    relay: StreamRelay,
    is_accepted: bool,
}

/// Ends when the reader has dropped a choice's stream.
pub type Cancelled = oneshot::Receiver<()>;

/// The choices of a request, each with the signal that its reader has left.
pub struct Answers(pub Vec<(Answer, Cancelled)>);

impl Answers {
    /// Returns the answers of several choices, and their readers' streams. All choices have the same id, which means
    /// nothing to the readers.
    pub fn new(id: RequestId, num_choices: u32) -> (Self, Vec<TokenStream>) {
        let choices = (0..num_choices).map(|_| {
            let (answer, cancelled, stream) = Answer::new(id);
            ((answer, cancelled), stream)
        });
        let (answers, streams) = choices.unzip();
        (Self(answers), streams)
    }

    /// Passes on the streams of a submission, or the reason why the submission was refused.
    pub fn relay(self, submitted: Result<Vec<TokenStream>, SubmitError>, runtime: &Handle) {
        match submitted {
            Ok(streams) => {
                for ((answer, cancelled), stream) in self.0.into_iter().zip(streams) {
                    runtime.spawn(async move {
                        tokio::select! {
                            () = answer.relay_all(stream) => {}
                            _ = cancelled => {}
                        }
                    });
                }
            }
            Err(error) => {
                for (mut answer, _) in self.0 {
                    answer.refuse(error.clone());
                }
            }
        }
    }
}

impl Answer {
    /// Returns the answer of a request that is submitted later, the signal that its reader has left, and the reader's
    /// stream.
    fn new(id: RequestId) -> (Self, Cancelled, TokenStream) {
        let (cancel, cancelled) = oneshot::channel();
        let (relay, stream) = relayed_stream(id, move || drop(cancel));
        let is_accepted = false;
        (Self { relay, is_accepted }, cancelled, stream)
    }

    pub fn accept(&mut self) {
        if !std::mem::replace(&mut self.is_accepted, true) {
            self.relay.send(StreamEvent::Accepted);
        }
    }

    /// Passes on an event. Acceptance is sent only once, and a refusal after acceptance becomes an error.
    pub fn pass(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Accepted => self.accept(),
            StreamEvent::Refused(error) if self.is_accepted => {
                self.fail(RequestError::Elsewhere(error.to_string().into()));
            }
            event => self.relay.send(event),
        }
    }

    pub fn refuse(&mut self, error: SubmitError) {
        match error {
            SubmitError::Refused(error) => self.pass(StreamEvent::Refused(error)),
            error @ (SubmitError::Draining | SubmitError::Lost(_)) => {
                self.fail(RequestError::EngineLost(error.to_string().into()));
            }
        }
    }

    fn fail(&mut self, error: RequestError) {
        self.relay.send(StreamEvent::Output(RequestOutput {
            request: self.relay.id(),
            finish: Some(FinishReason::Error(error)),
            ..RequestOutput::default()
        }));
    }

    pub async fn relay_all(mut self, mut stream: TokenStream) {
        while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
            self.pass(event);
        }
    }
}
