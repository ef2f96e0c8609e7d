//! `/health`, `/ready`, `/load`, `/version` and `/metrics`, for orchestrators and monitoring.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use corella_engine::EngineState;
use serde_json::json;

use crate::call::metrics::prefers_open_metrics;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

/// Answers 200 while the engine works, with the body of llama-server's answer. After a 503 the server must be
/// restarted.
pub async fn health(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    match state.engine.state() {
        EngineState::Ready | EngineState::Draining => Ok(json_response(&json!({ "status": "ok" }))),
        EngineState::Lost(reason) => Err(ApiError::not_ready(&reason)),
    }
}

/// Answers 200 if the server takes new requests, and can serve them in its role.
pub async fn ready(State(state): State<Arc<ServerState>>) -> Result<(), ApiError> {
    match state.engine.state() {
        EngineState::Ready if !state.is_draining() => {
            let obstacle = state.roles.as_ref().and_then(|roles| roles.obstacle());
            obstacle.map_or(Ok(()), |reason| Err(ApiError::no_service(reason)))
        }
        EngineState::Ready | EngineState::Draining => Err(ApiError::draining()),
        EngineState::Lost(reason) => Err(ApiError::not_ready(&reason)),
    }
}

/// Returns the number of unanswered requests, as vLLM does, without this request.
pub async fn load(State(state): State<Arc<ServerState>>) -> Response {
    let num_in_flight = *state.num_in_flight.borrow();
    json_response(&json!({ "server_load": num_in_flight.saturating_sub(1) }))
}

pub async fn version() -> Response {
    json_response(&json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Returns the metrics in the format that `Accept` prefers.
pub async fn metrics(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let metrics = &state.metrics;
    let renderer = &metrics.renderer;
    let text = renderer
        .text(|| metrics.encode(state.text_work()))
        .await
        .map_err(|_| ApiError::engine("The metrics could not be written."))?;
    let (content_type, text) = match prefers_open_metrics(&headers) {
        true => (
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            text.open_metrics(),
        ),
        false => (
            "text/plain; version=0.0.4; charset=utf-8",
            text.prometheus(),
        ),
    };
    Ok((
        [(CONTENT_TYPE, HeaderValue::from_static(content_type))],
        text,
    )
        .into_response())
}
