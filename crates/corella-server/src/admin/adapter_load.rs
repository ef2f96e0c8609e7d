//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form.

use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::model_set::model_use::UsedModel;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct LoadFields {
    lora_name: Option<String>,
    lora_path: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct UnloadFields {
    lora_name: Option<String>,
    /// vLLM numbers its adapters; Corella uses names only.
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<i64>,
}

/// `POST /v1/load_lora_adapter`
pub async fn load_adapter(
    UsedModel(state): UsedModel,
    body: SentBody,
) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let fields: LoadFields = body.parse()?;
    let name = required("lora_name", fields.lora_name)?;
    let path = required("lora_path", fields.lora_path)?;
    state.served.adapters.load(&name, &path).await?;
    Ok(json_response(
        &json!({"id": name, "object": "model", "root": path}),
    ))
}

/// `POST /v1/unload_lora_adapter`
pub async fn unload_adapter(
    UsedModel(state): UsedModel,
    body: SentBody,
) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let fields: UnloadFields = body.parse()?;
    let name = required("lora_name", fields.lora_name)?;
    let answer = json!({"id": name, "object": "model", "deleted": true});
    let unload = move |served: &ServedModel, _: &Caller| served.adapters.unload(&name);
    state.run_blocking(0, unload).await?;
    Ok(json_response(&answer))
}
