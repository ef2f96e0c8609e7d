//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Value, json};

use crate::call::request_id::RequestName;
use crate::wire::api_error::ApiError;

/// Returns the event that ends a failed stream.
pub fn error_event(error: &ApiError) -> Value {
    let (kind, message) = (kind_of(error.status), error.message());
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// The header with the answer's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Rewrites the error of an answer, from any layer, and adds the header `request-id`.
pub async fn in_anthropic_shape(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<RequestName>().cloned();
    let mut response = next.run(request).await;
    let name = name.as_ref().map(RequestName::as_str);
    if let Some(error) = response.extensions().get::<ApiError>() {
        let mut body = error_event(error);
        if let Some(name) = name {
            body["request_id"] = json!(name);
        }
        *response.body_mut() = Body::from(body.to_string());
    }
    if let Some(Ok(name)) = name.map(HeaderValue::from_str) {
        response.headers_mut().insert(REQUEST_ID, name);
    }
    response
}

fn kind_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::REQUEST_TIMEOUT => "timeout_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}
