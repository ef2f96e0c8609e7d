//! `x-request-id`: taken from the caller or from its `traceparent`, or generated, and returned with every response.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

use crate::call::request_trace::TRACE_PARENT;
use crate::clock::unix_now_s;

/// The id of a request in logs, in its response and on other servers.
#[derive(Clone, Debug)]
pub struct RequestName(Arc<str>);

impl RequestName {
    /// Returns a name that a caller gives in the request itself, if it is one.
    pub fn given(name: &str) -> Option<Self> {
        let is_plain = name.bytes().all(|byte| byte.is_ascii_graphic());
        let is_name = is_plain && !name.is_empty() && name.len() <= MAX_BYTES;
        is_name.then(|| Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn to_shared(&self) -> Arc<str> {
        self.0.clone()
    }
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
const MAX_BYTES: usize = 128;

pub async fn name_request(mut request: Request, next: Next) -> Response {
    let name = name_of(request.headers());
    request.extensions_mut().insert(RequestName(name.clone()));
    // Every log line about the request begins with its name.
    let span = tracing::info_span!("request", id = &*name);
    let mut response = next.run(request).instrument(span).await;
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

fn name_of(headers: &HeaderMap) -> Arc<str> {
    let text = |header| headers.get(header)?.to_str().ok();
    let given = text(HEADER).filter(|name| !name.is_empty() && name.len() <= MAX_BYTES);
    match given.or_else(|| trace_id(text(TRACE_PARENT)?)) {
        Some(name) => name.into(),
        None => new_name().into(),
    }
}

/// Returns the second field of `VERSION-TRACE_ID-PARENT_ID-FLAGS`; all zeros mean no trace.
fn trace_id(trace_parent: &str) -> Option<&str> {
    let trace_id = trace_parent.split('-').nth(1)?;
    let is_hex = trace_id.len() == 32 && trace_id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_hex && trace_id.bytes().any(|byte| byte != b'0')).then_some(trace_id)
}

/// Generates a name that is unique in this process, and in practice across restarts.
fn new_name() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    format!("{:08x}{process:08x}{count:08x}", unix_now_s() as u32)
}
