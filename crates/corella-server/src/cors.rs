//! Cross-origin requests: the web pages of other servers that may read answers (the Fetch standard, CORS).

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

use crate::server_state::ServerState;

/// The web pages that may use the server from a browser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Pages of the server itself and no others.
    #[default]
    Own,
    These(Vec<HeaderValue>),
    All,
}

impl AllowedOrigins {
    /// Reads origins, `SCHEME://HOST` or `SCHEME://HOST:PORT`, or `*` for all. The error is the invalid one.
    pub fn parse(origins: &[String]) -> Result<Self, &String> {
        if origins.is_empty() {
            return Ok(Self::Own);
        }
        if origins.iter().any(|origin| origin == "*") {
            return Ok(Self::All);
        }
        let origins = origins.iter().map(|origin| {
            let host = origin.split_once("://").map(|(_, host)| host);
            let is_host =
                |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '@', '*']);
            match HeaderValue::from_str(origin) {
                Ok(value) if host.is_some_and(is_host) => Ok(value),
                _ => Err(origin),
            }
        });
        origins.collect::<Result<_, _>>().map(Self::These)
    }

    /// Returns the header for a page of this origin. With `None`, its browser withholds answers from the page.
    fn answer(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self {
            Self::Own => None,
            Self::These(origins) => origins.contains(origin).then(|| origin.clone()),
            Self::All => Some(HeaderValue::from_static("*")),
        }
    }
}

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
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    let origins = &state.config.allowed_origins;
    let origin = request.headers().get(ORIGIN);
    let allowed = origin.and_then(|origin| origins.answer(origin));
    let asks_in_advance = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &allowed {
        Some(_) if asks_in_advance => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_a_host_and_nothing_else() {
        let parse = |origins: &[&str]| {
            let origins: Vec<_> = origins.iter().map(|&origin| origin.to_owned()).collect();
            AllowedOrigins::parse(&origins).map_err(String::clone)
        };
        assert_eq!(parse(&[]), Ok(AllowedOrigins::Own));
        assert_eq!(parse(&["https://a.example", "*"]), Ok(AllowedOrigins::All));
        let two = ["https://a.example", "http://localhost:3000"];
        let values = two.map(HeaderValue::from_static).to_vec();
        assert_eq!(parse(&two), Ok(AllowedOrigins::These(values)));
        for wrong in [
            "",
            "a.example",
            "https://",
            "https://a.example/",
            "https://a.example/page",
            "https://*.example",
            "https://me@a.example",
        ] {
            let origins = ["https://a.example", wrong];
            assert_eq!(parse(&origins), Err(wrong.to_owned()));
        }
    }
}
