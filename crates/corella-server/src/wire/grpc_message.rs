//! Messages and outcomes of gRPC calls. Before a message come a byte that says whether it is compressed, and its length
//! in four bytes. The outcome of a call is in its trailers.

use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use hyper::body::Frame;
use prost::Message;

use crate::wire::api_error::ApiError;
use crate::wire::protobuf_count::is_crowded;
use crate::wire::value_count::MAX_VALUES;

const PREFIX_BYTES: usize = 5;
pub const MEDIA_TYPE: &str = "application/grpc";
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// The codes of gRPC that this server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl Code {
    /// A gateway sends a call that is `Unavailable` to another server. So a limit of the caller's key is none.
    pub fn of(error: &ApiError) -> Self {
        match error.status {
            StatusCode::UNAUTHORIZED => Self::Unauthenticated,
            StatusCode::FORBIDDEN => Self::PermissionDenied,
            StatusCode::NOT_FOUND => Self::NotFound,
            StatusCode::REQUEST_TIMEOUT => Self::DeadlineExceeded,
            StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => Self::FailedPrecondition,
            StatusCode::TOO_MANY_REQUESTS if error.code() == Some("rate_limit_exceeded") => {
                Self::ResourceExhausted
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Self::Unavailable,
            StatusCode::NOT_IMPLEMENTED => Self::Unimplemented,
            _ if error.is_lost_engine() => Self::Unavailable,
            status if status.is_client_error() => Self::InvalidArgument,
            _ => Self::Internal,
        }
    }
}

/// Reads the only message of a call, unless it has too many fields. The fields in `prompt` have text or packed numbers.
pub fn read_crowd<M: Message + Default>(body: &[u8], prompt: &[u64]) -> Result<M, ApiError> {
    match is_crowded(only_message(body)?, prompt) {
        false => read_message(body),
        true => Err(ApiError::malformed(format!(
            "The message has more than {MAX_VALUES} fields."
        ))),
    }
}

/// Reads the only message of a call.
pub fn read_message<M: Message + Default>(body: &[u8]) -> Result<M, ApiError> {
    M::decode(only_message(body)?)
        .map_err(|error| ApiError::malformed(format!("The message cannot be read: {error}.")))
}

fn only_message(body: &[u8]) -> Result<&[u8], ApiError> {
    let Some((&[flag, ref length @ ..], message)) = body.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(ApiError::malformed("The call has no message."));
    };
    match flag {
        0 => {}
        1 => {
            return Err(ApiError::not_implemented(
                "Compressed messages are not read: send them without grpc-encoding.",
            ));
        }
        _ => {
            return Err(ApiError::malformed(
                "The call does not begin with a message.",
            ));
        }
    }
    // The length is the client's claim, and nothing is reserved for it.
    let length = u64::from(u32::from_be_bytes(*length));
    let present = message.len() as u64;
    if length > present {
        let reason = format!("The message has {present} of its {length} bytes.");
        return Err(ApiError::malformed(reason));
    }
    if length < present {
        return Err(ApiError::malformed("The call has more than one message."));
    }
    Ok(message)
}

/// Appends a message with its prefix.
pub fn write_message(message: &impl Message, to: &mut Vec<u8>) {
    let length = u32::try_from(message.encoded_len()).expect("no answer has 4 GiB");
    to.push(0);
    to.extend_from_slice(&length.to_be_bytes());
    // A vector has room for all messages.
    let written = message.encode(to);
    debug_assert!(written.is_ok());
}

/// The outcome of a call; without an error, its success.
pub fn trailers(error: Option<&ApiError>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    write_outcome(&mut trailers, error);
    trailers
}

fn write_outcome(headers: &mut HeaderMap, error: Option<&ApiError>) {
    let code = error.map_or(0, |error| Code::of(error) as u16);
    headers.insert(GRPC_STATUS, code.into());
    let Some(error) = error else { return };
    if let Ok(message) = HeaderValue::from_str(&percent_encoded(error.message())) {
        headers.insert(GRPC_MESSAGE, message);
    }
    if let Some(time_us) = error.retry_after_us() {
        headers.insert(RETRY_AFTER_MS, time_us.div_ceil(1000).into());
    }
    if code == Code::Unimplemented as u16 {
        headers.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

/// The beginning of an answer whose body has messages and trailers.
pub fn grpc_response(body: Body) -> Response {
    let mut response = Response::new(body);
    let media_type = HeaderValue::from_static(MEDIA_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}

/// An answer of one message.
pub fn message_response(message: &impl Message) -> Response {
    let mut bytes = Vec::new();
    write_message(message, &mut bytes);
    grpc_response(Body::new(MessageBody {
        message: Some(bytes.into()),
        trailers: Some(trailers(None)),
    }))
}

/// Makes of an error's answer one that has only an outcome.
pub fn into_outcome(mut response: Response, error: &ApiError) -> Response {
    *response.status_mut() = StatusCode::OK;
    *response.body_mut() = Body::empty();
    let headers = response.headers_mut();
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    write_outcome(headers, Some(error));
    response
}

struct MessageBody {
    message: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl HttpBody for MessageBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let message = self.message.take().map(Frame::data);
        let frame = message.or_else(|| self.trailers.take().map(Frame::trailers));
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers.is_none()
    }
}

#[cfg(test)]
mod tests {
    use corella_core::RequestError;

    use super::*;

    #[test]
    fn only_a_whole_single_plain_message_is_read() {
        let refused = |body: &[u8]| Code::of(&only_message(body).expect_err("it is refused"));
        assert_eq!(only_message(&[0, 0, 0, 0, 2, 7, 8]), Ok(&[7, 8][..]));
        assert_eq!(only_message(&[0; 5]), Ok(&[][..]));
        for short in 0..5 {
            assert_eq!(refused(&vec![0; short]), Code::InvalidArgument);
        }
        assert_eq!(refused(&[0, 0, 0, 0, 2, 7]), Code::InvalidArgument);
        let of_4_gib = [0, 0xff, 0xff, 0xff, 0xff, 7];
        assert_eq!(refused(&of_4_gib), Code::InvalidArgument);
        let two = [0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 1, 8];
        assert_eq!(refused(&two), Code::InvalidArgument);
        assert_eq!(refused(&[1, 0, 0, 0, 1, 7]), Code::Unimplemented);
        assert_eq!(refused(&[2, 0, 0, 0, 1, 7]), Code::InvalidArgument);
    }

    #[test]
    fn a_limit_of_a_key_differs_from_a_full_server() {
        let limited = ApiError::rate_limited("Slowly.", 1_500);
        assert_eq!(Code::of(&limited), Code::ResourceExhausted);
        assert_eq!(trailers(Some(&limited))["retry-after-ms"], "2");
        assert_eq!(Code::of(&ApiError::body_memory_full()), Code::Unavailable);
        assert_eq!(Code::of(&ApiError::draining()), Code::Unavailable);
        assert_eq!(Code::of(&ApiError::unauthorized()), Code::Unauthenticated);
        assert_eq!(Code::of(&ApiError::engine("x")), Code::Internal);
        let lost = RequestError::EngineLost("x".into());
        assert_eq!(Code::of(&ApiError::request(&lost)), Code::Unavailable);
        assert_eq!(trailers(None)["grpc-status"], "0");
    }

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(percent_encoded("100 % é\n"), "100 %25 %C3%A9%0A");
    }
}
