//! `/api/pull`: the models of the server are present already, and no other is fetched.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::call::call_context::CallContext;
use crate::model_set::driver::ModelSet;
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
    State(models): State<ModelSet>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let fields: PullFields = body.parse()?;
    body.check_fields(models.parts().field_check(Endpoint::OllamaPull))?;
    let asked = required("model", fields.model.or(fields.name))?;
    let untagged = models.untagged(&context, &asked).await;
    let known = Some(untagged).filter(|name| models.find(name).is_some());
    let known = known.ok_or_else(|| ApiError::not_pulled(&asked, &models.names(&context)))?;
    models.check_key(&context, Some(known))?;
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
