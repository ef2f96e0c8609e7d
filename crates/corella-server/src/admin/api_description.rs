//! `/openapi.json`: the description of the API.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use crate::state::server_state::ServerState;
use crate::wire::constant_answer::ConstantAnswer;
use crate::wire::openapi::document;

pub async fn openapi(State(state): State<Arc<ServerState>>, headers: HeaderMap) -> Response {
    let answer = state.openapi.get_or_init(|| {
        ConstantAnswer::new(document(&state.config).to_string(), "application/json")
    });
    answer.respond(&headers)
}
