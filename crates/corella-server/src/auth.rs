//! Checks the API key of a request.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderName;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api_error::ApiError;
use crate::server_state::ServerState;

/// The header by which Anthropic's clients send a key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

pub async fn require_api_key(
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    let Some(api_key) = &state.config.api_key else {
        return next.run(request).await;
    };
    let headers = request.headers();
    let authorization = headers.get(AUTHORIZATION);
    let given = match authorization {
        Some(value) => bearer(value.as_bytes()),
        None => headers.get(X_API_KEY).map(|value| value.as_bytes()),
    };
    if given.is_some_and(|given| is_same(given, api_key.as_bytes())) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    }
}

/// The token of an `Authorization: Bearer` header. The name of the scheme is case-insensitive.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then(|| token.trim_ascii())
}

/// Compares in constant time, so that the time does not tell how much of a key is right.
fn is_same(given: &[u8], expected: &[u8]) -> bool {
    let differences = given
        .iter()
        .zip(expected)
        .fold(0, |differences, (a, b)| differences | (a ^ b));
    given.len() == expected.len() && differences == 0
}
