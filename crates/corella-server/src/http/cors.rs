//! Cross-origin requests of web pages (the Fetch standard, CORS).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use corella_engine::rare_line;

use crate::config::allowed_origins::AllowedOrigins;
use crate::config::server_config::ServerConfig;
use crate::wire::api_error::ApiError;

/// The methods of all paths together.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// How long a browser may remember that a request is allowed, in seconds.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("600");
/// Response headers that scripts may read in addition to the standard ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, retry-after, retry-after-ms, \
     x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
     x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
);

/// Answers preflight requests, which have no key, and marks answers that pages may read.
pub async fn allow_origins(
    State(config): State<Arc<ServerConfig>>,
    request: Request,
    next: Next,
) -> Response {
    let origins = &config.allowed_origins;
    let origin = request.headers().get(ORIGIN).cloned();
    let allowed = origin.as_ref().and_then(|origin| origins.answer(origin));
    let asks_in_advance = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match (&allowed, origin) {
        (Some(_), _) if asks_in_advance => {
            let wanted = request
                .headers()
                .get(ACCESS_CONTROL_REQUEST_HEADERS)
                .cloned();
            let mut response = StatusCode::NO_CONTENT.into_response();
            let headers = response.headers_mut();
            headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
            headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
            if let Some(wanted) = wanted {
                headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted);
            }
            response
        }
        (None, Some(origin)) if asks_in_advance => refusal(&origin),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    if matches!(origins, AllowedOrigins::These(_)) {
        // A cache must not give the answer for one origin to another.
        headers.append(VARY, HeaderValue::from_static("origin"));
    }
    if let Some(allowed) = allowed {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}

/// Browsers do not show the answer to the page's author, so the operator learns of it, too.
fn refusal(origin: &HeaderValue) -> Response {
    let error = ApiError::origin_not_allowed(&String::from_utf8_lossy(origin.as_bytes()));
    rare_line!(warn, "{}", error.message());
    error.into_response()
}
