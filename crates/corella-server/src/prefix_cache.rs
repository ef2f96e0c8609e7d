//! `POST /reset_prefix_cache`: forgets cached prefixes.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use corella_engine::ResetError;
use serde::Deserialize;

use crate::api_error::ApiError;
use crate::request_body::RequestBody;
use crate::server_state::ServerState;
use crate::text_thread::Caller;

/// The body may be missing.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct ResetFields {
    /// Whether blocks outside of the KV cache are erased as well.
    tiers: Option<bool>,
}

/// Answers 409 while requests hold cached pages.
pub async fn reset_prefix_cache(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<(), ApiError> {
    let body = RequestBody::read(body, &state).await?;
    let fields: ResetFields = match body.num_bytes() {
        0 => ResetFields::default(),
        _ => body.parse()?,
    };
    let with_tiers = fields.tiers == Some(true);
    let reset = move |state: &ServerState, _: &Caller| {
        let engine = &state.engine;
        let reset = match with_tiers {
            true => engine.reset_prefix_cache_and_tiers(),
            false => engine.reset_prefix_cache(),
        };
        reset.map_err(|error| match error {
            ResetError::Busy => ApiError::conflict(format!("Nothing was reset: {error}.")),
            ResetError::Lost(reason) => ApiError::not_ready(&reason),
        })
    };
    state.run_blocking(0, reset).await
}
