//! The path of a call for hidden states, which is the same for all endpoints that need them.

use crate::call::call_context::CallContext;
use crate::call::metrics::CallTimer;
use crate::call::pooled_call::{PooledStates, PooledTexts, pool};
use crate::config::serve_config::ServeConfig;
use crate::state::server_state::ServerState;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::request_body::{RequestBody, SentBody};

/// Computes hidden states: `prepare` reads the texts from a body, and `finish` makes the answer from the hidden states
/// of the texts. Both run on text threads.
pub async fn serve_pooled<F: Send + 'static, R: Send + 'static>(
    state: &ServerState,
    context: &CallContext,
    body: SentBody,
    prepare: impl FnOnce(&ServedModel, &RequestBody, &Caller) -> Result<PooledTexts<F>, ApiError>
    + Send
    + 'static,
    finish: impl FnOnce(PooledStates<F>, &ServeConfig) -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), context);
    if state.parts.is_draining() {
        return Err(ApiError::draining());
    }
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |served: &ServedModel, caller: &Caller| prepare(served, &body, caller);
    let texts = state.run_blocking(num_bytes, prepare).await?;
    let pooled = pool(&state.calls, context, texts, timer).await?;
    // A head takes some tens of milliseconds for a million numbers, and so does writing them as JSON.
    let num_bytes = pooled.states.len() * size_of::<f32>() * state.config.hidden_size;
    let finish = move |served: &ServedModel, _: &Caller| finish(pooled, &served.config);
    state.run_blocking(num_bytes, finish).await
}
