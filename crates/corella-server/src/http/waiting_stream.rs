//! The stream of a request that waits for its model: signs of life until the model is loaded, and then the answer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::Frame;
use serde_json::json;

use crate::call::sse::{Events, SILENCE_PERIOD, Silence};
use crate::endpoint::messages::error_event;
use crate::model_set::model_use::ModelUse;
use crate::wire::api_error::ApiError;

/// Makes the answer once the model is loaded.
pub type Waiting = Pin<Box<dyn Future<Output = Response> + Send>>;

/// The form of events that are not part of the answer.
#[derive(Clone, Copy, PartialEq)]
pub enum StreamForm {
    OpenAi,
    Anthropic,
}

pub struct WaitingStream {
    form: StreamForm,
    silence: Silence,
    part: Part,
}

enum Part {
    Waiting(Waiting),
    Answer {
        body: Body,
        /// The answer's use of its model.
        _model_use: Option<Arc<ModelUse>>,
    },
    Ended,
}

impl WaitingStream {
    pub fn new(form: StreamForm, waiting: Waiting) -> Self {
        Self {
            form,
            silence: Silence::new(SILENCE_PERIOD),
            part: Part::Waiting(waiting),
        }
    }

    fn sign_of_life(&self) -> Events {
        let mut events = Events::default();
        match self.form {
            StreamForm::OpenAi => events.push_comment("the model is being loaded"),
            StreamForm::Anthropic => events.push_named("ping", &json!({"type": "ping"})),
        }
        events
    }

    /// The status of the stream is sent already, so an error is an event.
    fn error(&self, error: &ApiError) -> Events {
        let mut events = Events::default();
        match self.form {
            StreamForm::OpenAi => events.push_error(error),
            StreamForm::Anthropic => events.push_named("error", &error_event(error)),
        }
        events
    }
}

impl HttpBody for WaitingStream {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        loop {
            match &mut this.part {
                Part::Waiting(waiting) => match waiting.as_mut().poll(cx) {
                    Poll::Pending => {
                        return this.silence.poll_passed(cx).map(|()| {
                            let events = this.sign_of_life();
                            Some(Ok(Frame::data(events.into())))
                        });
                    }
                    Poll::Ready(response) if response.status() == StatusCode::OK => {
                        let (mut parts, body) = response.into_parts();
                        let _model_use = parts.extensions.remove();
                        this.part = Part::Answer { body, _model_use };
                    }
                    Poll::Ready(mut response) => {
                        this.part = Part::Ended;
                        let error = response.extensions_mut().remove::<ApiError>();
                        let error = error.unwrap_or_else(|| ApiError::engine("No answer came."));
                        let events = this.error(&error);
                        return Poll::Ready(Some(Ok(Frame::data(events.into()))));
                    }
                },
                Part::Answer { body, .. } => return Pin::new(body).poll_frame(cx),
                Part::Ended => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.part {
            Part::Waiting(_) => false,
            Part::Answer { body, .. } => body.is_end_stream(),
            Part::Ended => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use axum::response::IntoResponse;
    use tokio::sync::oneshot;

    use super::*;

    /// A stream whose signs of life come often.
    fn stream(form: StreamForm) -> (oneshot::Sender<Response>, WaitingStream) {
        let (answer, answered) = oneshot::channel();
        let waiting = async move { answered.await.expect("it is answered") };
        let stream = WaitingStream {
            silence: Silence::new(Duration::from_millis(1)),
            ..WaitingStream::new(form, Box::pin(waiting))
        };
        (answer, stream)
    }

    async fn next(stream: &mut WaitingStream) -> Option<String> {
        let frame = poll_fn(|cx| Pin::new(&mut *stream).poll_frame(cx)).await?;
        let data = frame.expect("no error").into_data().expect("it is data");
        Some(String::from_utf8(data.to_vec()).expect("it is UTF-8"))
    }

    #[tokio::test]
    async fn signs_of_life_come_before_the_answer() {
        for (form, sign) in [
            (StreamForm::OpenAi, ": the model is being loaded\n\n"),
            (
                StreamForm::Anthropic,
                "event: ping\ndata: {\"type\":\"ping\"}\n\n",
            ),
        ] {
            let (answer, mut stream) = stream(form);
            assert_eq!(next(&mut stream).await.as_deref(), Some(sign));
            answer
                .send(Response::new("data: x\n\n".into()))
                .expect("it waits");
            assert!(!stream.is_end_stream());
            assert_eq!(next(&mut stream).await.as_deref(), Some("data: x\n\n"));
            assert_eq!(next(&mut stream).await, None);
        }
    }

    #[tokio::test]
    async fn an_error_after_the_begin_is_an_event() {
        for form in [StreamForm::OpenAi, StreamForm::Anthropic] {
            let (answer, mut stream) = stream(form);
            let error = ApiError::model_unavailable("a", "its file has gone");
            answer.send(error.into_response()).expect("it waits");
            let event = next(&mut stream).await.expect("an event");
            assert!(event.starts_with("event: error\ndata: {"), "{event}");
            assert!(event.contains("its file has gone"), "{event}");
            assert!(stream.is_end_stream());
            assert_eq!(next(&mut stream).await, None);
        }
    }
}
