//! The log line of an answered request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::Request;

use crate::auth::Background;
use crate::request_trace::EndedRequest;

/// Counts a request's tokens for its log line.
#[derive(Debug)]
pub struct RequestLine {
    /// The path as the client wrote it, without its query, which may contain a key.
    path: String,
    num_prompt_tokens: AtomicU64,
    num_output_tokens: AtomicU64,
}

/// Probes and scrapes come every few seconds and would hide all other lines.
const UNLOGGED_PATHS: [&str; 3] = ["/health", "/ready", "/metrics"];
/// Clients choose the path, and lines must stay short.
const MAX_PATH_CHARS: usize = 256;

impl RequestLine {
    /// Returns `None` for probes, scrapes and the lines of batches, whose results are in the batch's own file.
    pub fn of(request: &Request) -> Option<Arc<Self>> {
        let path = request.uri().path();
        let is_of_batch = request.extensions().get::<Background>().is_some();
        if is_of_batch || UNLOGGED_PATHS.contains(&path) {
            return None;
        }
        Some(Arc::new(Self {
            path: path.chars().take(MAX_PATH_CHARS).collect(),
            num_prompt_tokens: AtomicU64::new(0),
            num_output_tokens: AtomicU64::new(0),
        }))
    }

    pub fn add_prompt(&self, num_tokens: usize) {
        let num_tokens = num_tokens as u64;
        self.num_prompt_tokens
            .fetch_add(num_tokens, Ordering::Relaxed);
    }

    pub fn add_output_token(&self) {
        self.num_output_tokens.fetch_add(1, Ordering::Relaxed);
    }

    pub fn write(&self, ended: &EndedRequest) {
        tracing::info!(
            // The span of the request has the same id, and is open only if its client has left early.
            parent: None,
            id = ended.id,
            method = ended.method,
            path = self.path,
            status = ended.status,
            prompt_tokens = self.num_prompt_tokens.load(Ordering::Relaxed),
            output_tokens = self.num_output_tokens.load(Ordering::Relaxed),
            seconds = seconds(ended.arrival.elapsed()),
            "answered"
        );
    }
}
/// Whole milliseconds: further digits would hide the rest of the line.
fn seconds(time: Duration) -> f64 {
    time.as_millis() as f64 / 1e3
}
