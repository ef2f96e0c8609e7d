//! `/sleep`, `/wake_up` and `/is_sleeping`, in vLLM's form.

use axum::body::Body;
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::model_set::driver::ModelSet;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

#[derive(Default, Deserialize)]
#[serde(expecting = "a JSON object")]
struct SleepFields {
    level: Option<i64>,
}

/// `POST /sleep`: unloads all models, and answers when they are unloaded. Running requests end first. A later request
/// for an answer loads its model again.
///
/// vLLM reads the level from the query. llama-swap sends it in a body, which other clients leave out.
pub async fn sleep(State(models): State<ModelSet>, uri: Uri, body: Body) -> Result<(), ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let fields: SleepFields = match body.num_bytes() {
        0 => SleepFields::default(),
        _ => body.parse()?,
    };
    let query = uri.query().unwrap_or_default().split('&');
    let mut levels = query.filter_map(|pair| pair.strip_prefix("level="));
    let level = match (levels.next(), fields.level) {
        (None, None | Some(1)) | (Some("1"), _) => 1,
        (None, Some(2)) | (Some("2"), _) => 2,
        _ => return Err(ApiError::invalid("level", "must be 1 or 2")),
    };
    if !models.has_loader() {
        return Err(ApiError::model_stays());
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
