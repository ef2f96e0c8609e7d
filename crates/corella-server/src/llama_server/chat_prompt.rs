//! `/apply-template`: a conversation's text by the chat template.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::api_error::ApiError;
use crate::call::{check_model, json_response};
use crate::chat_completions::ChatFields;
use crate::request_body::RequestBody;
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table::Endpoint;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ModelField {
    model: Option<String>,
}

pub async fn apply_template(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<Response, ApiError> {
    let body = RequestBody::read(body, &state).await?;
    let num_bytes = body.num_bytes();
    let apply = move |state: &ServerState, caller: &Caller| {
        let mut chat = ChatFields::parse(&body, state)?;
        let field: ModelField = body.parse()?;
        let check = state.field_check(Endpoint::ApplyTemplate);
        body.check_fields(check)?;
        check_model(state, field.model.as_deref())?;
        let prompt = chat.prompt_text(state, check, caller)?;
        Ok(json_response(&json!({"prompt": prompt})))
    };
    state.run_blocking(num_bytes, apply).await
}
