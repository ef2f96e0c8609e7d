//! `/models/load` and `/models/unload`, in the form of llama.cpp's router.

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::call::call_context::CallContext;
use crate::model_set::driver::ModelSet;
use crate::model_set::model_loader::ModelId;
use crate::wire::api_error::{ApiError, required};
use crate::wire::json_response::json_response;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct ModelFields {
    model: Option<String>,
}

/// `POST /models/load`: begins to load a model.
pub async fn load_model(
    State(models): State<ModelSet>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let model = named_model(&models, &context, body).await?;
    models.load(model)?;
    Ok(json_response(&json!({"success": true})))
}

/// `POST /models/unload`: begins to unload a model. Running requests end first.
pub async fn unload_model(
    State(models): State<ModelSet>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let model = named_model(&models, &context, body).await?;
    if !models.has_loader() {
        return Err(ApiError::model_stays());
    }
    models.unload(model)?;
    Ok(json_response(&json!({"success": true})))
}

async fn named_model(
    models: &ModelSet,
    context: &CallContext,
    body: Body,
) -> Result<ModelId, ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let fields: ModelFields = body.parse()?;
    let name = required("model", fields.model)?;
    models.find_or_add(context, &name).await;
    models.check_key(context, Some(&name))
}
