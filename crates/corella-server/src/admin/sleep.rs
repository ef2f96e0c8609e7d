//! `/sleep`, `/wake_up` and `/is_sleeping`, in vLLM's form.

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use serde_json::json;

use crate::model_set::driver::ModelSet;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

/// `POST /sleep`: unloads all models, and answers when they are unloaded. Running requests end first. A later request
/// for an answer loads its model again.
pub async fn sleep(State(models): State<ModelSet>, uri: Uri) -> Result<(), ApiError> {
    let query = uri.query().unwrap_or_default().split('&');
    let mut levels = query.filter_map(|pair| pair.strip_prefix("level="));
    let level = match levels.next() {
        None | Some("1") => 1,
        Some("2") => 2,
        Some(_) => return Err(ApiError::invalid("level", "must be 1 or 2")),
    };
    if !models.has_loader() {
        return Err(ApiError::conflict(
            "This server cannot sleep: an option such as --role or --enable-lora needs its model to stay loaded.",
        ));
    }
    models.sleep(level).await
}

/// `POST /wake_up`: loads the models again that the sleep has unloaded, and answers when they are loaded.
pub async fn wake_up(State(models): State<ModelSet>, uri: Uri) -> Result<(), ApiError> {
    let mut query = uri.query().unwrap_or_default().split('&');
    if query.any(|pair| pair == "tags" || pair.starts_with("tags=")) {
        let message = "is not supported: weights and KV cache wake together, so leave it out";
        return Err(ApiError::invalid("tags", message));
    }
    models.wake().await
}

pub async fn is_sleeping(State(models): State<ModelSet>) -> Response {
    json_response(&json!({ "is_sleeping": models.is_asleep() }))
}
