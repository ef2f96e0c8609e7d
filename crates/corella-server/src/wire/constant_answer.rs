//! An answer that stays the same while the server runs: it is made once, and a client that has the answer gets a 304.

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use sha2::{Digest, Sha256};

pub struct ConstantAnswer {
    body: Bytes,
    content_type: &'static str,
    tag: HeaderValue,
}

impl ConstantAnswer {
    pub fn new(body: impl Into<Bytes>, content_type: &'static str) -> Self {
        let body: Bytes = body.into();
        let digest = Sha256::digest(&body);
        let tag: String = digest[..12]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let tag = HeaderValue::from_str(&format!("\"{tag}\""));
        Self {
            body,
            content_type,
            tag: tag.expect("digits make a header"),
        }
    }

    /// Answers a request with these headers. The status is 304 if the client has the same answer already.
    pub fn respond(&self, request: &HeaderMap) -> Response {
        let mut response = match self.is_known(request) {
            true => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::NOT_MODIFIED;
                response
            }
            false => {
                let mut response = Response::new(Body::from(self.body.clone()));
                let content_type = HeaderValue::from_static(self.content_type);
                response.headers_mut().insert(CONTENT_TYPE, content_type);
                response
            }
        };
        let headers = response.headers_mut();
        headers.insert(ETAG, self.tag.clone());
        // Clients must ask each time: the next server on this address may be another version, and files of two versions
        // do not fit together.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// Returns whether the client has this answer. Weak tags count, because proxies that compress answers make tags
    /// weak.
    fn is_known(&self, request: &HeaderMap) -> bool {
        let tag = self.tag.as_bytes();
        let lists = request.get_all(IF_NONE_MATCH).iter();
        let mut known = lists.flat_map(|list| list.as_bytes().split(|&byte| byte == b','));
        known.any(|known| {
            let known = known.trim_ascii();
            known == b"*" || known.strip_prefix(b"W/").unwrap_or(known) == tag
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_names_the_tag_gets_no_body() {
        let answer = ConstantAnswer::new("{}", "application/json");
        let status = |known: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(IF_NONE_MATCH, known.parse().expect("a header"));
            let response = answer.respond(&headers);
            assert_eq!(response.headers()[ETAG], answer.tag);
            let has_type = response.headers().contains_key(CONTENT_TYPE);
            assert_eq!(has_type, response.status() == StatusCode::OK);
            response.status().as_u16()
        };
        let tag = answer.tag.to_str().expect("text");
        for known in [
            tag,
            "*",
            &format!("W/{tag}"),
            &format!("\"a\", {tag} ,\"b\""),
        ] {
            assert_eq!(status(known), 304, "{known}");
        }
        for known in ["", "\"a\"", tag.trim_matches('"')] {
            assert_eq!(status(known), 200, "{known}");
        }
        let other = ConstantAnswer::new("[]", "application/json");
        assert_ne!(other.tag, answer.tag);
    }
}
