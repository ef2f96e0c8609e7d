//! Bytes of a request → typed fields, bounded in size and time, with errors that name the field.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use serde::de::DeserializeOwned;

use crate::api_error::ApiError;

/// A whole body, not yet read as JSON. Each part of it is read by the struct that owns those
/// fields, so one body may be parsed several times; fields that nobody names are skipped.
pub struct RequestBody(Bytes);

#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    pub max_bytes: usize,
    /// From the end of the headers to the end of the body.
    pub timeout: Duration,
}

impl RequestBody {
    pub async fn read(body: Body, limits: BodyLimits) -> Result<Self, ApiError> {
        let deadline = tokio::time::Instant::from(Instant::now() + limits.timeout);
        match tokio::time::timeout_at(deadline, collect(body, limits.max_bytes)).await {
            Ok(result) => result,
            Err(_) => Err(ApiError::body_too_slow(limits.timeout.as_secs())),
        }
    }

    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(&self.0);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            if inner.is_data() && path != "." {
                ApiError::invalid(path, without_position(&inner.to_string()))
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

async fn collect(mut body: Body, max_bytes: usize) -> Result<RequestBody, ApiError> {
    let declared = body.size_hint().lower();
    let mut oversized = declared > max_bytes as u64;
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
        if oversized {
            // What is left is read and dropped: a client that is still sending when the
            // connection closes sees a reset instead of the answer.
            bytes = Vec::new();
        } else {
            bytes.extend_from_slice(&data);
        }
    }
    if oversized {
        Err(ApiError::body_too_large(max_bytes))
    } else {
        Ok(RequestBody(Bytes::from(bytes)))
    }
}

/// The position says little about a body that a library wrote; the path says it better.
fn without_position(message: &str) -> &str {
    message
        .rfind(" at line ")
        .map_or(message, |at| &message[..at])
}
