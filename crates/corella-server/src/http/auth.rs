//! Checks the API key of a request, and counts the request against the key's limits.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::call::account::{Account, ApiKeys};
use crate::call::request_line::RequestLine;
use crate::wire::api_error::ApiError;

/// The header with a key from Anthropic's clients.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The keys of a port.
#[derive(Clone)]
pub struct KeyCheck {
    pub keys: Arc<ApiKeys>,
    /// The name of the key by which callers without one count; without a name they are refused.
    pub default_name: Option<Arc<str>>,
}

impl KeyCheck {
    fn account(&self, headers: &HeaderMap) -> Option<Arc<Account>> {
        let is_absent = !headers.contains_key(AUTHORIZATION) && !headers.contains_key(X_API_KEY);
        match &self.default_name {
            Some(name) if is_absent => self.keys.named(name),
            _ => self.keys.find(presented(headers)?),
        }
    }
}

/// Passes requests with a valid key. Requests that only read (GET) do not count against the key's limits.
pub async fn require_api_key(
    State(check): State<KeyCheck>,
    mut request: Request,
    next: Next,
) -> Response {
    if !check.keys.are_required() {
        return next.run(request).await;
    }
    let Some(account) = check.account(request.headers()) else {
        return ApiError::unauthorized().into_response();
    };
    if let Some(line) = request.extensions().get::<Arc<RequestLine>>() {
        line.set_key(account.name());
    }
    let taken = match *request.method() {
        Method::GET | Method::HEAD => Ok(()),
        _ => account.take_request(),
    };
    let mut response = match taken {
        Ok(()) => {
            request.extensions_mut().insert(account.clone());
            next.run(request).await
        }
        Err(refused) => {
            tracing::debug!(key = account.name(), "refused by its limit of requests");
            refused.into_response()
        }
    };
    account.write_headers(response.headers_mut());
    response
}

/// Passes only keys that may change the server. This layer comes after `require_api_key`.
pub async fn require_admin(request: Request, next: Next) -> Response {
    match request.extensions().get::<Arc<Account>>() {
        Some(account) if !account.is_admin() => {
            ApiError::forbidden("This API key may not change the server.").into_response()
        }
        _ => next.run(request).await,
    }
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    match headers.get(AUTHORIZATION) {
        Some(value) => bearer(value.as_bytes()),
        None => headers.get(X_API_KEY).map(|value| value.as_bytes()),
    }
}

/// The token of an `Authorization: Bearer` header. The name of the scheme is case-insensitive.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then(|| token.trim_ascii())
}
