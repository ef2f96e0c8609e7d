//! The log line of an answered request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::Request;

use crate::call::call_context::Background;
use crate::call::request_trace::EndedRequest;
use crate::wire::api_error::ApiError;

/// Collects a request's facts for its log line.
#[derive(Debug)]
pub struct RequestLine {
    /// The path as the client wrote it, without its query, which may contain a key.
    path: String,
    num_prompt_tokens: AtomicU64,
    num_cached_tokens: AtomicU64,
    num_output_tokens: AtomicU64,
    details: Mutex<Details>,
}

/// The facts that are no counts.
#[derive(Debug, Default)]
struct Details {
    /// The model or adapter that the caller named.
    model: Option<String>,
    /// The name of the caller's API key.
    key: Option<String>,
    time_to_first_token: Option<Duration>,
    /// The finish reason of the choice that finished last.
    finish: Option<&'static str>,
    /// The code of the request's error, or the type of an error without a code.
    error: Option<&'static str>,
    /// The message of an error that came while the answer was generated.
    reason: Option<String>,
}

/// Paths of probes and scrapes, which come every few seconds.
const PROBE_PATHS: [&str; 7] = [
    "/health",
    "/v1/health",
    "/ping",
    "/ready",
    "/metrics",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
];
const PAGES: [&str; 2] = ["/", "/docs"];
const FILES_OF_THE_PAGE: &str = "/page/";
/// Clients choose the path, and lines must stay short.
const MAX_PATH_CHARS: usize = 256;

/// Whether a path only tells how the server is, to programs that ask again and again.
pub fn is_probe(path: &str) -> bool {
    PROBE_PATHS.contains(&path)
}

/// Whether a request has neither a line nor a span. Probes and scrapes come every few seconds, and a browser asks for
/// each file of the page: they would hide all other requests.
pub fn is_unlogged(path: &str) -> bool {
    is_probe(path) || PAGES.contains(&path) || path.starts_with(FILES_OF_THE_PAGE)
}

impl RequestLine {
    /// Returns `None` for probes, scrapes, files of the page and the lines of batches, whose results are in the batch's
    /// own file.
    pub fn of(request: &Request) -> Option<Arc<Self>> {
        let path = request.uri().path();
        let is_of_batch = request.extensions().get::<Background>().is_some();
        if is_of_batch || is_unlogged(path) {
            return None;
        }
        Some(Arc::new(Self {
            path: path.chars().take(MAX_PATH_CHARS).collect(),
            num_prompt_tokens: AtomicU64::new(0),
            num_cached_tokens: AtomicU64::new(0),
            num_output_tokens: AtomicU64::new(0),
            details: Mutex::default(),
        }))
    }

    pub fn set_model(&self, model: &str) {
        self.details().model = Some(model.to_owned());
    }

    pub fn set_key(&self, name: &str) {
        self.details().key = Some(name.to_owned());
    }

    pub fn add_prompt(&self, num_tokens: usize) {
        let num_tokens = num_tokens as u64;
        self.num_prompt_tokens
            .fetch_add(num_tokens, Ordering::Relaxed);
    }

    pub fn add_cached(&self, num_tokens: u32) {
        self.num_cached_tokens
            .fetch_add(num_tokens.into(), Ordering::Relaxed);
    }

    pub fn add_output_token(&self) {
        self.num_output_tokens.fetch_add(1, Ordering::Relaxed);
    }

    pub fn set_time_to_first_token(&self, time: Duration) {
        self.details().time_to_first_token = Some(time);
    }

    pub fn set_finish(&self, reason: &'static str) {
        self.details().finish = Some(reason);
    }

    /// Records an error that the status shows.
    pub fn set_refusal(&self, error: &ApiError) {
        self.details().error = Some(error.code_or_type());
    }

    /// Records an error that came while the answer was generated, when the status of a stream has been sent already.
    pub fn set_failure(&self, error: &ApiError) {
        let mut details = self.details();
        details.finish = Some("error");
        details.error = Some(error.code_or_type());
        details.reason = Some(error.message().to_owned());
    }

    pub fn write(&self, ended: &EndedRequest) {
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let details = self.details();
        tracing::info!(
            // The span of the request has the same id, and is open only if its client has left early.
            parent: None,
            id = ended.id,
            method = ended.method,
            path = self.path,
            model = details.model.as_deref(),
            key = details.key.as_deref(),
            status = ended.status,
            error = details.error,
            reason = details.reason.as_deref(),
            prompt_tokens = count(&self.num_prompt_tokens),
            cached_tokens = count(&self.num_cached_tokens),
            output_tokens = count(&self.num_output_tokens),
            finish = details.finish,
            ttft = details.time_to_first_token.map(seconds),
            seconds = seconds(ended.arrival.elapsed()),
            "answered"
        );
    }

    fn details(&self) -> MutexGuard<'_, Details> {
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns seconds in whole milliseconds: further digits would hide the rest of the line.
fn seconds(time: Duration) -> f64 {
    time.as_millis() as f64 / 1e3
}
