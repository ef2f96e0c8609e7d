//! `x-request-id`: taken from the caller or made up, and returned with every response.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::server_state::unix_now_s;

/// The id of a request in logs, in its response and on other servers.
#[derive(Clone, Debug)]
pub struct RequestName(Arc<str>);

impl RequestName {
    pub fn as_str(&self) -> &str {
        &self.0
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
    let given = request
        .headers()
        .get(HEADER)
        .and_then(|value| value.to_str().ok())
        .filter(|value| !value.is_empty() && value.len() <= MAX_BYTES);
    let name: Arc<str> = match given {
        Some(name) => name.into(),
        None => new_name().into(),
    };
    request.extensions_mut().insert(RequestName(name.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// Makes a name that is unique in this process, and in practice across restarts.
fn new_name() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    format!("{:08x}{process:08x}{count:08x}", unix_now_s() as u32)
}
