//! Checks the API key of a request, and counts the request against the key's limits.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use corella_engine::TraceScope;

use crate::api_error::ApiError;
use crate::api_key::Account;
use crate::request_id::RequestName;
use crate::request_line::RequestLine;
use crate::server_state::ServerState;

/// The header by which Anthropic's clients send a key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Passes requests with a valid key. Requests that only read (GET) do not count against its limits.
pub async fn require_api_key(
    State(state): State<Arc<ServerState>>,
    mut request: Request,
    next: Next,
) -> Response {
    if !state.api_keys.are_required() {
        return next.run(request).await;
    }
    let presented = presented(request.headers());
    let Some(account) = presented.and_then(|key| state.api_keys.find(key)) else {
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

/// Marks the requests of batches, whose clients do not wait.
#[derive(Clone, Copy)]
pub struct Background;

/// The caller's facts, as found by the layers before a handler.
#[derive(Clone)]
pub struct CallContext {
    pub name: RequestName,
    /// `None` if the server requires no key.
    pub account: Option<Arc<Account>>,
    /// `None` if the request is not traced.
    pub trace: Option<TraceScope>,
    /// `None` if the call has no line in the log.
    pub line: Option<Arc<RequestLine>>,
    /// Whether other requests come first.
    pub is_background: bool,
}

impl CallContext {
    /// Returns the owner of objects that the call leaves on the server: the name of its API key.
    pub fn owner(&self) -> Option<Arc<str>> {
        let account = self.account.as_ref();
        account.map(|account| account.name().into())
    }

    /// Returns the priority of the call's requests, if the caller may not choose it.
    pub fn priority(&self) -> Option<i32> {
        match (self.is_background, &self.account) {
            (true, _) => Some(i32::MAX),
            (false, account) => account.as_ref().and_then(|account| account.priority()),
        }
    }

    /// Refuses models that the key may not use, as if they did not exist.
    pub fn check_model(&self, state: &ServerState, model: &str) -> Result<(), ApiError> {
        let Some(account) = &self.account else {
            return Ok(());
        };
        match state
            .config
            .names_like(model)
            .any(|name| account.may_use(name))
        {
            true => Ok(()),
            false => Err(ApiError::model_not_allowed(model)),
        }
    }
}

impl FromRequestParts<Arc<ServerState>> for CallContext {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<ServerState>) -> Result<Self, ApiError> {
        let name = parts.extensions.get::<RequestName>().cloned();
        let name = name.ok_or_else(|| ApiError::engine("The request has no name."))?;
        let account = parts.extensions.get::<Arc<Account>>().cloned();
        let trace = parts.extensions.get::<TraceScope>().cloned();
        Ok(Self {
            name,
            account,
            trace,
            line: parts.extensions.get::<Arc<RequestLine>>().cloned(),
            is_background: parts.extensions.get::<Background>().is_some(),
        })
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
