//! The rest of a body whose request is answered early, for example because of a wrong path or key.
//!
//! A connection with an unread rest cannot carry another request, and a client that notices only with its next request
//! reports a lost connection. So a short rest is read, and a longer one is announced by `connection: close`.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::{CONNECTION, EXPECT};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

const MAX_REST_BYTES: usize = 256 << 10;
/// Limits how long the answer waits for the rest.
const MAX_WAIT: Duration = Duration::from_secs(5);

pub async fn read_rest(request: Request, next: Next) -> Response {
    // A client with this header sends its body only after `100 Continue`.
    let waits_to_be_asked = request.headers().contains_key(EXPECT);
    let rest = Rest::default();
    let body_rest = rest.clone();
    let request = request.map(|body| {
        Body::new(ObservedBody {
            body: Some(body),
            rest: body_rest,
        })
    });
    let mut response = next.run(request).await;
    if let Some(body) = rest.take()
        && (waits_to_be_asked || !is_read(body).await)
    {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response
}

/// Reads a body to its end. Returns false if the body is too long or too slow.
async fn is_read(mut body: Body) -> bool {
    let reading = async {
        let mut num_bytes = 0;
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let Ok(frame) = frame else { return false };
            num_bytes += frame.data_ref().map_or(0, Bytes::len);
            if num_bytes > MAX_REST_BYTES {
                return false;
            }
        }
        true
    };
    tokio::time::timeout(MAX_WAIT, reading)
        .await
        .unwrap_or(false)
}

/// A body that was dropped before its end.
#[derive(Clone, Default)]
struct Rest(Arc<Mutex<Option<Body>>>);

impl Rest {
    fn take(&self) -> Option<Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, body: Body) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
    }
}

struct ObservedBody {
    /// `None` after the body's end.
    body: Option<Body>,
    rest: Rest,
}

impl HttpBody for ObservedBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let body = self.body.as_ref();
        body.map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for ObservedBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            self.rest.put(body);
        }
    }
}
