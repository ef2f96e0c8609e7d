//! `/embedding`: a vector of each text, in llama-server's shape.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{check_model, json_response};
use crate::embeddings::{check_vectors, prompt, vector};
use crate::metrics::CallTimer;
use crate::pooled_call::{PoolingFields, TextForm, pool, pooled_prompts};
use crate::prompt::PromptField;
use crate::request_body::RequestBody;
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table::Endpoint;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct EmbeddingFields {
    content: Option<PromptField>,
    /// The same field under OpenAI's name.
    input: Option<PromptField>,
    embd_normalize: Option<i64>,
}

/// llama-server has a vector for each token if a model does not pool, so its answers allow several.
#[derive(Serialize)]
struct Embedding {
    index: usize,
    embedding: [Vec<f32>; 1],
}

pub async fn embedding(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), &context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = RequestBody::read(body, &state).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |state: &ServerState, caller: &Caller| {
        let pooling: PoolingFields = body.parse()?;
        let fields: EmbeddingFields = body.parse()?;
        body.check_fields(state.field_check(Endpoint::LlamaEmbedding))?;
        let model = check_model(state, pooling.model.as_deref())?;
        let is_normalised = match fields.embd_normalize {
            None | Some(2) => true,
            Some(-1) => false,
            Some(_) => {
                let message = "must be 2 (a vector of length 1) or -1 (as it comes)";
                return Err(ApiError::invalid("embd_normalize", message));
            }
        };
        let params = pooling.params(&state.config)?;
        let (field, input) = match (fields.content, fields.input) {
            (Some(_), Some(_)) => {
                let message = "cannot be combined with content";
                return Err(ApiError::invalid("input", message));
            }
            (Some(content), None) => ("content", content),
            (None, Some(input)) => ("input", input),
            (None, None) => return Err(ApiError::invalid("content", "is required")),
        };
        check_vectors(&state.config)?;
        let form = TextForm {
            add_special_tokens: pooling.add_special_tokens,
            prefix: prompt(&state.config, None)?,
        };
        let prompts = pooled_prompts(state, field, input, form, caller)?;
        Ok(((prompts, field), params, model, is_normalised))
    };
    let (prompts, params, model, is_normalised) = state.run_blocking(num_bytes, prepare).await?;
    let pooled = pool(&state, &context, prompts, &model, params, timer).await?;
    let num_dimensions = state.config.vector_len();
    let num_bytes = pooled.states.len() * size_of::<f32>() * num_dimensions;
    // A million numbers take some tens of milliseconds as JSON.
    let write = move |server: &ServerState, _: &Caller| {
        let states = pooled.states.iter().enumerate();
        let answer: Vec<_> = states
            .map(|(index, state)| Embedding {
                index,
                embedding: [vector(&server.config, state, num_dimensions, is_normalised)],
            })
            .collect();
        Ok(json_response(&answer))
    };
    state.run_blocking(num_bytes, write).await
}
