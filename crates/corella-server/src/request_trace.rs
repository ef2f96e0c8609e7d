//! The spans of a request: the whole of it, and what its time went into.

use std::time::Instant;

use axum::http::{HeaderMap, HeaderName};
use corella_engine::{Span, SpanKind, TraceContext, Tracer};

/// W3C Trace Context.
pub const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");

/// The span of a request, which goes on until the answer has been sent.
#[derive(Clone, Debug)]
pub struct RequestTrace {
    tracer: Tracer,
    context: TraceContext,
    parent_id: Option<u64>,
}

impl RequestTrace {
    /// Goes on with the trace of the caller, or begins one. `None` if the caller does not want to see it.
    pub fn begin(tracer: &Tracer, headers: &HeaderMap) -> Option<Self> {
        let header = { headers.get(TRACE_PARENT) }.and_then(|header| header.to_str().ok());
        let parent = header.and_then(TraceContext::parse);
        let context = match &parent {
            Some(parent) => parent.child(),
            None => TraceContext::root(),
        };
        context.is_sampled.then(|| Self {
            tracer: tracer.clone(),
            context,
            parent_id: parent.map(|parent| parent.span_id),
        })
    }

    /// The request has ended: its answer was sent, or its client has left.
    pub fn end(&self, request: &EndedRequest) {
        let EndedRequest {
            arrival,
            method,
            route,
            status,
            id,
        } = request;
        let name = format!("{method} {route}");
        let mut span = Span::new(name, self.context, self.parent_id, *arrival, Instant::now())
            .with("http.request.method", *method)
            .with("http.route", *route)
            .with("http.response.status_code", u32::from(*status))
            .with("corella.request_id", *id);
        span.kind = SpanKind::Server;
        // A client that left, and what it sent wrong, is no failure of the server.
        span.error = (*status >= 500).then(|| format!("status {status}"));
        self.tracer.record(span);
    }

    /// A part of the request that has ended; `describe` adds to it.
    pub fn part(
        &self,
        name: &str,
        start: Instant,
        end: Instant,
        describe: impl FnOnce(Span) -> Span,
    ) {
        let parent_id = Some(self.context.span_id);
        let span = Span::new(name, self.context.child(), parent_id, start, end);
        self.tracer.record(describe(span));
    }
}

/// What is known of a request at its end.
pub struct EndedRequest<'a> {
    pub arrival: Instant,
    pub method: &'a str,
    /// The path as it is routed, so that there are few.
    pub route: &'a str,
    pub status: u16,
    pub id: &'a str,
}
