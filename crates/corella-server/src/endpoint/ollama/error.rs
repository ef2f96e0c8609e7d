//! Errors in Ollama's shape: `{"error": MESSAGE}`.

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;

use crate::wire::api_error::ApiError;

#[derive(Serialize)]
pub struct ErrorLine<'a> {
    error: &'a str,
}

impl<'a> ErrorLine<'a> {
    pub fn new(error: &'a ApiError) -> Self {
        Self {
            error: error.message(),
        }
    }
}

/// Rewrites the errors of answers, from any layer.
pub async fn in_ollama_shape(request: Request, next: Next) -> Response {
    with_ollama_error(next.run(request).await)
}

/// Rewrites an answer that is an error.
pub fn with_ollama_error(mut response: Response) -> Response {
    if let Some(error) = response.extensions().get::<ApiError>() {
        let body = serde_json::to_vec(&ErrorLine::new(error)).unwrap_or_default();
        *response.body_mut() = Body::from(body);
    }
    response
}
