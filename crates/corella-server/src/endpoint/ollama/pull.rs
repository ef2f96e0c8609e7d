//! `/api/pull`: the served model is present already, and no other is fetched.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use super::options::served_model;
use crate::call::call_context::CallContext;
use crate::state::server_state::ServerState;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct PullFields {
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    stream: Option<bool>,
}

pub async fn pull_model(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let body = state.bodies.read(body).await?;
    let fields: PullFields = body.parse()?;
    body.check_fields(state.served.field_check(Endpoint::OllamaPull))?;
    let asked = required("model", fields.model.or(fields.name))?;
    let model = served_model(&state.served, Some(&asked));
    let model = model.map_err(|_| ApiError::not_pulled(&asked, &state.config))?;
    context.check_model(&state.config, &model)?;
    if fields.stream == Some(false) {
        return Ok(json_response(&json!({"status": "success"})));
    }
    let lines =
        ["pulling manifest", "success"].map(|status| format!("{}\n", json!({"status": status})));
    let mut response = Response::new(Body::from(lines.concat()));
    let content_type = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    Ok(response)
}
