//! Counts every HTTP request once, with the status that its client gets.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use corella_engine::TraceScope;
use hyper::body::{Frame, SizeHint};

use crate::call::request_id::RequestName;
use crate::call::request_line::{RequestLine, is_probe, is_unlogged};
use crate::call::request_trace::{EndedRequest, begin_trace};
use crate::grpc::health::WATCH;
use crate::model_set::model_use::ModelUse;
use crate::state::server_parts::ServerParts;
use crate::state::use_count::Counted;
use crate::wire::api_error::ApiError;

pub async fn count_request(
    State(server): State<Arc<ServerParts>>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    // The body of an answer to HEAD is never read.
    let expects_body = request.method() != Method::HEAD;
    let name = request.extensions().get::<RequestName>().cloned();
    let tracer = server.config.tracer.as_ref();
    let tracer = tracer.filter(|_| !is_unlogged(request.uri().path()));
    let trace = tracer.and_then(|tracer| begin_trace(tracer, request.headers()));
    if let Some(trace) = trace.clone() {
        request.extensions_mut().insert(trace);
    }
    let line = match server.config.logs_requests {
        true => RequestLine::of(&request),
        false => None,
    };
    if let Some(line) = line.clone() {
        request.extensions_mut().insert(line);
    }
    let in_use = (!is_probe(request.uri().path())).then(|| server.use_count.uses.begin());
    let method = request.method().clone();
    let mut record = Record::new(server, name, method, path, trace);
    record.line = line;
    record.in_use = in_use;
    let mut response = next.run(request).await;
    record.model_use = response.extensions_mut().remove();
    let error = response.extensions().get::<ApiError>();
    // The answer to a failed gRPC call has status 200, too.
    let status = match error {
        Some(error) if response.status() == StatusCode::OK => error.status,
        _ => response.status(),
    };
    record.status = status.as_u16();
    if let (Some(line), Some(error)) = (&record.line, error) {
        line.set_refusal(error);
    }
    let (parts, body) = response.into_parts();
    let body = CountedBody {
        body,
        record,
        ended: !expects_body,
    };
    Response::from_parts(parts, Body::new(body))
}

/// The status that nginx logs when a client closes the connection before its answer is complete.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Counts its request when it is dropped. If the client leaves, the handler and this record are dropped, and the status
/// is still the initial 499.
struct Record {
    server: Arc<ServerParts>,
    name: Option<RequestName>,
    method: Method,
    path: Option<MatchedPath>,
    trace: Option<TraceScope>,
    /// `None` if the request has no line in the log.
    line: Option<Arc<RequestLine>>,
    /// `None` for a probe, which is no use of the server.
    in_use: Option<Counted>,
    /// `None` if the request uses no model.
    model_use: Option<Arc<ModelUse>>,
    status: u16,
    arrival: Instant,
}

impl Record {
    fn new(
        server: Arc<ServerParts>,
        name: Option<RequestName>,
        method: Method,
        path: Option<MatchedPath>,
        trace: Option<TraceScope>,
    ) -> Self {
        if is_counted(path.as_ref()) {
            server.num_in_flight.send_modify(|num| *num += 1);
        }
        Self {
            server,
            name,
            method,
            path,
            trace,
            line: None,
            in_use: None,
            model_use: None,
            status: CLIENT_CLOSED_REQUEST,
            arrival: Instant::now(),
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // Only existing paths become labels, so that the number of labels is bounded.
        let path = self.path.as_ref().map_or("other", MatchedPath::as_str);
        self.server.http_metrics.handle_response(path, self.status);
        let ended = EndedRequest {
            arrival: self.arrival,
            method: self.method.as_str(),
            route: path,
            status: self.status,
            id: self.name.as_ref().map_or("", RequestName::as_str),
        };
        if let Some(trace) = &self.trace {
            ended.record(trace);
        }
        match &self.line {
            Some(line) => line.write(&ended),
            None => tracing::debug!(
                id = ended.id,
                path,
                status = ended.status,
                seconds = self.arrival.elapsed().as_secs_f32(),
                "answered"
            ),
        }
        if is_counted(self.path.as_ref()) {
            self.server.num_in_flight.send_modify(|num| *num -= 1);
        }
    }
}

/// A watch of the server's health is no load, and ends by itself when the server drains.
fn is_counted(path: Option<&MatchedPath>) -> bool {
    path.is_none_or(|path| path.as_str() != WATCH)
}

/// A response body that knows whether it was read to its end.
struct CountedBody {
    body: Body,
    record: Record,
    ended: bool,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if let Poll::Ready(None) = &frame {
            this.ended = true;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        if !self.ended && !self.body.is_end_stream() {
            self.record.status = CLIENT_CLOSED_REQUEST;
        }
    }
}
