//! `POST /reset_prefix_cache`: forgets cached prefixes.

use std::sync::Arc;

use axum::extract::State;
use corella_engine::ResetError;

use crate::api_error::ApiError;
use crate::server_state::ServerState;
use crate::text_thread::Caller;

/// Answers 409 while requests hold cached pages.
pub async fn reset_prefix_cache(State(state): State<Arc<ServerState>>) -> Result<(), ApiError> {
    let reset = |state: &ServerState, _: &Caller| {
        state
            .engine
            .reset_prefix_cache()
            .map_err(|error| match error {
                ResetError::Busy => ApiError::conflict(format!("Nothing was reset: {error}.")),
                ResetError::Lost(reason) => ApiError::not_ready(&reason),
            })
    };
    state.run_blocking(0, reset).await
}
