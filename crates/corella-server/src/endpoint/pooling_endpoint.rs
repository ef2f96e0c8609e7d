//! The path of a call for hidden states through all endpoints that need them.

use axum::body::Body;
use corella_core::HiddenState;

use crate::call::call_context::CallContext;
use crate::call::metrics::CallTimer;
use crate::call::pooled_call::{PoolingUsage, pool};
use crate::config::serve_config::ServeConfig;
use crate::state::server_state::ServerState;
use crate::text::pooled_prompt::{PooledPrompt, PoolingParams};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::request_body::RequestBody;

/// A request, checked and tokenised.
pub struct PooledTexts<F> {
    pub prompts: Vec<PooledPrompt>,
    /// The field with most of the prompts, named in errors.
    pub field: &'static str,
    pub params: PoolingParams,
    pub model: String,
    /// The endpoint's data for its answer.
    pub format: F,
}

/// The hidden states of a request's prompts, in their order.
pub struct Pooled<F> {
    pub states: Vec<HiddenState>,
    pub usage: PoolingUsage,
    pub model: String,
    pub format: F,
}

/// Computes the hidden states of the texts from `prepare`, of which `finish` makes the result. Both run on text
/// threads.
pub async fn serve_pooled<F: Send + 'static, R: Send + 'static>(
    state: &ServerState,
    context: &CallContext,
    body: Body,
    prepare: impl FnOnce(&ServedModel, &RequestBody, &Caller) -> Result<PooledTexts<F>, ApiError>
    + Send
    + 'static,
    finish: impl FnOnce(Pooled<F>, &ServeConfig) -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = state.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |served: &ServedModel, caller: &Caller| prepare(served, &body, caller);
    let texts = state.run_blocking(num_bytes, prepare).await?;
    let (prompts, model) = ((texts.prompts, texts.field), texts.model);
    let pooled = pool(&state.calls, context, prompts, &model, texts.params, timer).await?;
    let pooled = Pooled {
        states: pooled.states,
        usage: pooled.usage,
        model,
        format: texts.format,
    };
    // A million numbers take some tens of milliseconds, in a head or as JSON.
    let num_bytes = pooled.states.len() * size_of::<f32>() * state.config.hidden_size;
    let finish = move |served: &ServedModel, _: &Caller| finish(pooled, &served.config);
    state.run_blocking(num_bytes, finish).await
}
