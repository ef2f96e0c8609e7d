//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;

use crate::call::request_id::RequestName;
use crate::wire::api_error::ApiError;

#[derive(Serialize)]
struct Envelope<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: ErrorBody<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

impl<'a> Envelope<'a> {
    fn new(error: &'a ApiError, request_id: Option<&'a str>) -> Self {
        Self {
            kind: "error",
            error: ErrorBody {
                kind: kind_of(error.status),
                message: error.message(),
            },
            request_id,
        }
    }
}

/// The header with the answer's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Rewrites the error of an answer, from any layer, and adds the header `request-id`.
pub async fn in_anthropic_shape(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<RequestName>().cloned();
    let mut response = next.run(request).await;
    let name = name.as_ref().map(RequestName::as_str);
    if let Some(error) = response.extensions().get::<ApiError>() {
        let body = serde_json::to_vec(&Envelope::new(error, name)).unwrap_or_default();
        *response.body_mut() = Body::from(body);
    }
    if let Some(Ok(name)) = name.map(HeaderValue::from_str) {
        response.headers_mut().insert(REQUEST_ID, name);
    }
    response
}

/// Returns the event that ends a failed stream.
pub fn error_event(error: &ApiError) -> impl Serialize {
    Envelope::new(error, None)
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
