//! The span of a request: its trace, and its attributes at the end.

use std::time::Instant;

use axum::http::{HeaderMap, HeaderName};
use corella_engine::{SpanKind, TraceContext, TraceScope, Tracer};

/// The header of W3C Trace Context.
pub const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");

/// Continues the caller's trace, or begins one. Returns `None` if the caller's trace is not sampled.
pub fn begin_trace(tracer: &Tracer, headers: &HeaderMap) -> Option<TraceScope> {
    let header = headers
        .get(TRACE_PARENT)
        .and_then(|header| header.to_str().ok());
    TraceScope::begin(tracer, header.and_then(TraceContext::parse))
}

/// The facts about a request at its end: its answer was sent, or its client has left.
pub struct EndedRequest<'a> {
    pub arrival: Instant,
    pub method: &'a str,
    /// The path's route, so that the number of values is small.
    pub route: &'a str,
    pub status: u16,
    pub id: &'a str,
}

impl EndedRequest<'_> {
    pub fn record(&self, trace: &TraceScope) {
        let name = format!("{} {}", self.method, self.route);
        trace.finish(&name, self.arrival, Instant::now(), |span| {
            let mut span = span
                .with("http.request.method", self.method)
                .with("http.route", self.route)
                .with("http.response.status_code", u32::from(self.status))
                .with("corella.request_id", self.id);
            span.kind = SpanKind::Server;
            // A client that leaves or sends a faulty request is no failure of the server.
            span.error = (self.status >= 500).then(|| format!("status {}", self.status));
            span
        });
    }
}
