//! Sends a generation as server-sent events, or as lines of JSON.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use hyper::body::Frame;
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

use crate::call::generation::{ChoiceDelta, Generation};
use crate::wire::api_error::ApiError;
use crate::wire::grpc_message::write_message;
use crate::wire::usage::Usage;

/// Formats a generation as the events of an endpoint.
pub trait ChunkEncoder: Send + Unpin + 'static {
    /// The media type of the stream.
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events);

    /// Encodes the end after every choice has finished. `usage` covers the whole call.
    fn encode_end(&mut self, usage: &Usage, events: &mut Events);

    /// Writes a sign of life into a silent stream. Proxies and clients cut silent streams, nginx after 60 s and Claude
    /// Code after 20 s, but a long prompt on a CPU takes minutes.
    fn encode_keep_alive(&mut self, events: &mut Events) {
        events.push_comment("still working");
    }

    /// Encodes the end of a failed stream.
    fn encode_error(&mut self, error: &ApiError, events: &mut Events) {
        events.push_error(error);
    }

    /// Returns the trailers that follow the end or the error.
    fn trailers(&mut self) -> Option<HeaderMap> {
        None
    }
}

/// Encoded events that wait to be written.
#[derive(Default)]
pub struct Events(Vec<u8>);

impl Events {
    pub fn push(&mut self, chunk: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Chunks are structs of strings and numbers, whose encoding cannot fail.
        let written = serde_json::to_writer(&mut self.0, chunk);
        debug_assert!(written.is_ok());
        self.0.extend_from_slice(b"\n\n");
    }

    /// Writes an event with a name. Clients of some APIs recognise events by their names.
    pub fn push_named(&mut self, name: &str, data: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.push(data);
    }

    /// Writes a line of JSON, for APIs whose streams have such lines instead of events.
    pub fn push_line(&mut self, line: &impl Serialize) {
        let written = serde_json::to_writer(&mut self.0, line);
        debug_assert!(written.is_ok());
        self.0.push(b'\n');
    }

    /// Writes a line that clients of event streams skip.
    pub fn push_comment(&mut self, text: &str) {
        self.0.extend_from_slice(b": ");
        self.0.extend_from_slice(text.as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }

    /// Writes a message of gRPC.
    pub fn push_message(&mut self, message: &impl prost::Message) {
        write_message(message, &mut self.0);
    }

    pub fn push_error(&mut self, error: &ApiError) {
        self.0.extend_from_slice(b"event: error\ndata: ");
        self.0.extend_from_slice(error.to_json().as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }

    pub fn push_done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

impl From<Events> for Bytes {
    fn from(events: Events) -> Self {
        events.0.into()
    }
}

/// Limits the bytes of deltas that are written together: a slow reader catches up in few writes, and a call with many
/// choices does not fill memory.
const FRAME_BYTES: usize = 16 << 10;

pub fn sse_response<E: ChunkEncoder>(generation: Generation, encoder: E) -> Response {
    stream_response(stream_body(generation, encoder), E::CONTENT_TYPE)
}

/// The body of a stream, for a response whose head the caller writes.
pub fn stream_body<E: ChunkEncoder>(generation: Generation, encoder: E) -> Body {
    Body::new(StreamBody {
        generation: Some(generation),
        encoder,
        silence: Silence::new(SILENCE_PERIOD),
        trailers: None,
    })
}

/// A response whose body is server-sent events.
pub fn event_stream(body: Body) -> Response {
    stream_response(body, "text/event-stream; charset=utf-8")
}

fn stream_response(body: Body, content_type: &'static str) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Without this header, nginx buffers tokens before passing them on.
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

/// A stream checks for silence at the end of each period.
pub const SILENCE_PERIOD: Duration = Duration::from_secs(5);

/// Notices a silent stream, one to two periods after its last output. The timer is not reset for each token.
pub struct Silence {
    period: Duration,
    end_of_period: Pin<Box<Sleep>>,
    has_spoken: bool,
}

impl Silence {
    pub fn new(period: Duration) -> Self {
        Self {
            period,
            end_of_period: Box::pin(sleep(period)),
            has_spoken: false,
        }
    }

    /// Ready when a period without output has ended.
    pub fn poll_passed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.end_of_period.as_mut().poll(cx).is_ready() {
            let next = Instant::now() + self.period;
            self.end_of_period.as_mut().reset(next);
            if !std::mem::take(&mut self.has_spoken) {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}

/// The body of a stream. The encoder writes the end when every choice has finished, or an error in place of the rest.
struct StreamBody<E> {
    /// `None` after the last event. The generation is dropped with the body when the client leaves.
    generation: Option<Generation>,
    encoder: E,
    silence: Silence,
    /// Present from the last event on, until they have been sent.
    trailers: Option<HeaderMap>,
}

impl<E: ChunkEncoder> StreamBody<E> {
    fn end(&mut self) {
        self.generation = None;
        self.trailers = self.encoder.trailers();
    }
}

impl<E: ChunkEncoder> HttpBody for StreamBody<E> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let mut events = Events::default();
        while let Some(generation) = &mut this.generation {
            match generation.poll_delta(cx) {
                Poll::Pending if events.0.is_empty() => match this.silence.poll_passed(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) => this.encoder.encode_keep_alive(&mut events),
                },
                Poll::Pending => break,
                Poll::Ready(Some(Ok(delta))) => this.encoder.encode_delta(delta, &mut events),
                Poll::Ready(Some(Err(error))) => {
                    this.encoder.encode_error(&error, &mut events);
                    this.end();
                }
                Poll::Ready(None) => {
                    this.encoder.encode_end(&generation.usage(), &mut events);
                    this.end();
                }
            }
            if events.0.len() >= FRAME_BYTES {
                break;
            }
        }
        if events.0.is_empty() {
            let trailers = this.trailers.take();
            return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
        }
        this.silence.has_spoken = true;
        Poll::Ready(Some(Ok(Frame::data(events.0.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.generation.is_none() && self.trailers.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test]
    async fn silence_is_noticed_and_what_was_said_counts_for_one_period() {
        let mut silence = Silence::new(Duration::from_millis(1));
        poll_fn(|cx| silence.poll_passed(cx)).await;
        silence.has_spoken = true;
        poll_fn(|cx| silence.poll_passed(cx)).await;
        assert!(!silence.has_spoken);
    }
}
