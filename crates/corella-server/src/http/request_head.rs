//! Refuses a request that a proxy in front of this server may read differently. Otherwise the proxy and this server
//! could disagree where the next request on the connection begins (request smuggling).

use axum::extract::Request;
use axum::http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use axum::http::{HeaderMap, HeaderValue, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::wire::api_error::ApiError;

pub async fn check_head(request: Request, next: Next) -> Response {
    match fault(request.version(), request.headers()) {
        None => next.run(request).await,
        Some(fault) => {
            let mut response = ApiError::malformed(fault).into_response();
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
            response
        }
    }
}

fn fault(version: Version, headers: &HeaderMap) -> Option<&'static str> {
    let num_hosts = headers.get_all(HOST).iter().count();
    if num_hosts > 1 || (num_hosts == 0 && version == Version::HTTP_11) {
        return Some("A request of HTTP/1.1 has one Host header.");
    }
    let mut encodings = headers.get_all(TRANSFER_ENCODING).iter();
    if !encodings.all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"chunked")) {
        return Some("This server reads no transfer-encoding other than chunked.");
    }
    None
}
