//! Answers of the gRPC port: an error of any layer becomes the outcome of its call.

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use crate::wire::api_error::ApiError;
use crate::wire::grpc_message::{MEDIA_TYPE, into_outcome};
use crate::wire::short_text::shown;

pub async fn in_grpc_shape(request: Request, next: Next) -> Response {
    if !is_call(&request) {
        let mut response = Response::new(Body::from("This port speaks gRPC.\n"));
        *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return response;
    }
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>().cloned() {
        Some(error) => into_outcome(response, &error),
        None => response,
    }
}

fn is_call(request: &Request) -> bool {
    let media_type = request.headers().get(CONTENT_TYPE);
    let rest = media_type.and_then(|given| given.as_bytes().strip_prefix(MEDIA_TYPE.as_bytes()));
    let is_known = rest.is_some_and(|rest| rest.is_empty() || rest == b"+proto" || rest[0] == b';');
    is_known && request.method() == Method::POST
}

/// Gateways find out by this answer which services a server has.
pub async fn unknown_method(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::not_implemented(format!("This server has no {}.", shown(path)))
}
