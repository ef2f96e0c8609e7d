//! `/apply-template`: a conversation's text by the chat template.

use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::model_set::model_use::UsedModel;
use crate::text::chat_fields::ChatFields;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ModelField {
    model: Option<String>,
}

pub async fn apply_template(
    UsedModel(state): UsedModel,
    body: SentBody,
) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let apply = move |served: &ServedModel, caller: &Caller| {
        let mut chat = ChatFields::parse(&body, served)?;
        let field: ModelField = body.parse()?;
        let check = served.field_check(Endpoint::ApplyTemplate);
        body.check_fields(check)?;
        served.check_name(field.model.as_deref())?;
        let prompt = chat.prompt_text(served, check, caller)?;
        Ok(json_response(&json!({"prompt": prompt})))
    };
    state.run_blocking(num_bytes, apply).await
}
