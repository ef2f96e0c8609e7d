//! `/health`, `/ready`, `/load`, `/version` and `/metrics`, for orchestrators and monitoring.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use corella_engine::EngineState;
use serde_json::json;

use crate::call::metrics::prefers_open_metrics;
use crate::model_set::driver::ModelSet;
use crate::model_set::model_view::ModelView;
use crate::state::server_parts::ServerParts;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

/// Answers 200 while the engine works, with the body of llama-server's answer. After a 503 the server must be
/// restarted. A server of several models always answers 200: a lost engine fails only the requests of its model.
pub async fn health(State(models): State<ModelSet>) -> Result<Response, ApiError> {
    match models.only_engine_state() {
        Some(EngineState::Lost(reason)) => Err(ApiError::not_ready(&reason)),
        _ => Ok(json_response(&json!({ "status": "ok" }))),
    }
}

/// Answers 200 if the server takes new requests, and can serve them in its role.
pub async fn ready(State(models): State<ModelSet>) -> Result<(), ApiError> {
    readiness(&models)
}

pub fn readiness(models: &ModelSet) -> Result<(), ApiError> {
    match models.only_engine_state() {
        Some(EngineState::Lost(reason)) => Err(ApiError::not_ready(&reason)),
        Some(EngineState::Draining) => Err(ApiError::draining()),
        _ if models.parts().is_draining() => Err(ApiError::draining()),
        _ => {
            let only = models.only_model();
            let roles = only.as_ref().and_then(|state| state.roles.as_ref());
            let obstacle = roles.and_then(|roles| roles.obstacle());
            obstacle.map_or(Ok(()), |reason| Err(ApiError::no_service(reason)))
        }
    }
}

/// Returns the number of unanswered requests, as vLLM does, without this request.
pub async fn load(State(server): State<Arc<ServerParts>>) -> Response {
    let num_in_flight = *server.num_in_flight.borrow();
    json_response(&json!({ "server_load": num_in_flight.saturating_sub(1) }))
}

pub async fn version() -> Response {
    json_response(&json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Returns the metrics in the format that `Accept` prefers.
pub async fn metrics(
    State(models): State<ModelSet>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let server = models.parts();
    let metrics = &server.http_metrics;
    let render = || {
        let mut text = String::new();
        models.encode_metrics(&mut text)?;
        for view in models.views() {
            let name = view.setting.names.first().map_or("", String::as_str);
            metrics.set_model_state(name, view.status_name(), &ModelView::STATUS_NAMES);
        }
        metrics.encode(&mut text, server.text_threads.stats())?;
        Ok::<_, std::fmt::Error>(text)
    };
    let text = metrics
        .renderer
        .text(render)
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
