//! Reads the body of a request, bounded in size and time, into typed fields. Errors name the field.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::Extensions;
use serde::de::{DeserializeOwned, DeserializeSeed};
use tokio::sync::watch;

use crate::config::server_config::ServerConfig;
use crate::wire::api_error::ApiError;
use crate::wire::body_memory::{BodyMemory, BodyShare};
use crate::wire::field_check::FieldCheck;
use crate::wire::type_mismatch::in_json_words;
use crate::wire::value_count::{MAX_VALUES, crowded_field};

/// Reads bodies within the server's limits.
pub struct BodyReader {
    max_bytes: usize,
    timeout: Duration,
    memory: Arc<BodyMemory>,
    is_draining: watch::Receiver<bool>,
}

impl BodyReader {
    pub fn new(config: &ServerConfig, is_draining: watch::Receiver<bool>) -> Self {
        Self {
            max_bytes: config.max_body_bytes,
            timeout: config.body_timeout,
            memory: BodyMemory::new(config.max_body_memory),
            is_draining,
        }
    }

    /// Reads a body. A server that begins to drain stops waiting for it, because it would refuse the request anyway.
    pub async fn read(&self, body: impl Into<SentBody>) -> Result<RequestBody, ApiError> {
        let body = match body.into() {
            SentBody::Read(body) => return Ok(body),
            SentBody::Unread(body) => body,
        };
        let mut is_draining = self.is_draining.clone();
        tokio::select! {
            biased;
            result = collect(body, self.max_bytes, self.memory.share()) => result,
            () = tokio::time::sleep(self.timeout) => {
                Err(ApiError::body_too_slow(self.timeout.as_secs()))
            }
            _ = is_draining.wait_for(|&is_draining| is_draining) => Err(ApiError::draining()),
        }
    }
}

/// A complete body, not yet parsed as JSON. Each struct parses its own fields, so a body may be parsed several times;
/// `check_fields` finds the fields that no struct reads.
pub struct RequestBody {
    bytes: Bytes,
    /// The field in which the body exceeds the limit of values, if it does. It is known after the first parse.
    crowded_field: OnceLock<Option<String>>,
    _share: BodyShare,
}

impl RequestBody {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Leaves the body, with its share of the memory, for the handler's [`SentBody`].
    pub fn leave_in(self, extensions: &mut Extensions) {
        extensions.insert(LeftBody(Arc::new(Mutex::new(Some(self)))));
    }

    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        self.check_num_values()?;
        self.count()
    }

    /// Parses a body without a bound on its number of values, for a `T` that keeps nothing large.
    pub fn count<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        self.parse_with(PhantomData)
    }

    /// Refuses a body with fields that no struct reads.
    pub fn check_fields(&self, check: FieldCheck) -> Result<(), ApiError> {
        self.check_num_values()?;
        self.parse_with(check)?
    }

    fn check_num_values(&self) -> Result<(), ApiError> {
        let crowded_field = self
            .crowded_field
            .get_or_init(|| crowded_field(&self.bytes));
        crowded_field.as_ref().map_or(Ok(()), |name| {
            let message = format!(
                "the body has more than {MAX_VALUES} values up to the end of this field, not counting token ids"
            );
            Err(ApiError::invalid(name, message))
        })
    }

    fn parse_with<T>(
        &self,
        seed: impl for<'de> DeserializeSeed<'de, Value = T>,
    ) -> Result<T, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(&self.bytes);
        let mut track = serde_path_to_error::Track::new();
        let deserializer = serde_path_to_error::Deserializer::new(&mut json, &mut track);
        let value = seed.deserialize(deserializer);
        let value = value.map_err(|error| serde_path_to_error::Error::new(track.path(), error));
        let value = value.map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            if inner.is_data() && path != "." {
                let message = inner.to_string();
                ApiError::invalid(path, in_json_words(without_position(&message)))
            } else if inner.is_data() {
                ApiError::malformed(format!(
                    "The request body is not the JSON object expected: {}.",
                    without_position(&inner.to_string())
                ))
            } else {
                ApiError::malformed(format!("The request body is not valid JSON: {inner}."))
            }
        })?;
        json.end().map_err(|error| {
            ApiError::malformed(format!("The request body is not valid JSON: {error}."))
        })?;
        Ok(value)
    }
}

/// The body of a request, which a layer before the handler may have read.
pub enum SentBody {
    Read(RequestBody),
    Unread(Body),
}

/// Extensions have to be cloned, and a body is taken once.
#[derive(Clone)]
struct LeftBody(Arc<Mutex<Option<RequestBody>>>);

impl From<Body> for SentBody {
    fn from(body: Body) -> Self {
        Self::Unread(body)
    }
}

impl<S: Sync> FromRequest<S> for SentBody {
    type Rejection = Infallible;

    async fn from_request(mut request: Request, _: &S) -> Result<Self, Infallible> {
        let left = request.extensions_mut().remove::<LeftBody>();
        let read = left.and_then(|LeftBody(body)| {
            let mut body = body.lock().unwrap_or_else(PoisonError::into_inner);
            body.take()
        });
        Ok(read.map_or_else(|| Self::Unread(request.into_body()), Self::Read))
    }
}

async fn collect(
    mut body: Body,
    max_bytes: usize,
    mut share: BodyShare,
) -> Result<RequestBody, ApiError> {
    let declared = body.size_hint().lower();
    let mut oversized = declared > max_bytes as u64;
    let mut is_crowded_out = false;
    let mut bytes = Vec::new();
    while let Some(frame) =
        std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx)).await
    {
        let frame = frame.map_err(|error| {
            ApiError::malformed(format!("The request body could not be read: {error}."))
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        oversized |= bytes.len() + data.len() > max_bytes;
        is_crowded_out |= !oversized && !is_crowded_out && !share.try_grow(data.len());
        if oversized || is_crowded_out {
            // The rest is read and dropped: if the connection closed while the client still sends, the client would see
            // a reset instead of the answer.
            bytes = Vec::new();
            share.give_back();
        } else {
            bytes.extend_from_slice(&data);
        }
    }
    if oversized {
        Err(ApiError::body_too_large(max_bytes as u64))
    } else if is_crowded_out {
        Err(ApiError::body_memory_full())
    } else {
        Ok(RequestBody {
            bytes: Bytes::from(bytes),
            crowded_field: OnceLock::new(),
            _share: share,
        })
    }
}

/// Removes the position of an error: a library wrote the body, so the path of the field is more helpful.
fn without_position(message: &str) -> &str {
    message
        .rfind(" at line ")
        .map_or(message, |at| &message[..at])
}
