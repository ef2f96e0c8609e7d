//! `/api/embed`: a vector for each text; and `/api/embeddings`, its older form for one text.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_core::Namespace;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::json_response;
use crate::embeddings::{check_dimensions, check_vectors, prompt, vector};
use crate::metrics::CallTimer;
use crate::pooled_call::{
    PooledPrompt, PoolingParams, PoolingUsage, TextForm, pool, pooled_prompts,
};
use crate::prompt::{Prompt, PromptField};
use crate::request_body::RequestBody;
use crate::serve_config::ServeConfig;
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table::Endpoint;

use super::options::{check_options, served_model};

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct EmbedFields {
    model: Option<String>,
    input: Option<PromptField>,
    dimensions: Option<usize>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct OlderFields {
    model: Option<String>,
    prompt: Option<String>,
}

/// The texts of a call.
struct Texts {
    model: String,
    prompts: Vec<PooledPrompt>,
    /// The number of values kept of each vector.
    num_dimensions: usize,
}

/// Vectors are cut to `dimensions` and then scaled to length 1.
pub async fn embed(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let prepare = |body: RequestBody, state: &ServerState, caller: &Caller| {
        check_options(&body, state, caller, Endpoint::OllamaEmbed)?;
        let fields: EmbedFields = body.parse()?;
        let num_dimensions = check_dimensions(fields.dimensions, &state.config)?;
        let PromptField(mut inputs) = fields.input.unwrap_or(PromptField(Vec::new()));
        if let [input] = &*inputs
            && is_empty(input)
        {
            inputs.clear();
        }
        Ok(Texts {
            model: served_model(state, fields.model.as_deref())?,
            prompts: pooled_prompts(state, "input", PromptField(inputs), form(state)?, caller)?,
            num_dimensions,
        })
    };
    let write = move |vectors: Vectors, config: &ServeConfig| {
        let answer = EmbedAnswer {
            embeddings: { vectors.values.iter() }
                .map(|state| vector(config, state, vectors.num_dimensions, true))
                .collect(),
            total_duration: start.elapsed().as_nanos() as u64,
            load_duration: 0,
            prompt_eval_count: vectors.usage.prompt_tokens,
            model: vectors.model,
        };
        json_response(&answer)
    };
    vectors(&state, &context, body, "input", prepare, write).await
}

/// The vector is not scaled.
pub async fn embeddings(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let prepare = |body: RequestBody, state: &ServerState, caller: &Caller| {
        check_options(&body, state, caller, Endpoint::OllamaEmbeddings)?;
        let fields: OlderFields = body.parse()?;
        let text = fields.prompt.filter(|prompt| !prompt.is_empty());
        let text = PromptField(text.map(Prompt::Text).into_iter().collect());
        Ok(Texts {
            model: served_model(state, fields.model.as_deref())?,
            prompts: pooled_prompts(state, "prompt", text, form(state)?, caller)?,
            num_dimensions: state.config.vector_len(),
        })
    };
    let write = |vectors: Vectors, config: &ServeConfig| {
        let first = vectors.values.first();
        json_response(&OlderAnswer {
            embedding: first.map_or_else(Vec::new, |state| {
                vector(config, state, vectors.num_dimensions, false)
            }),
        })
    };
    vectors(&state, &context, body, "prompt", prepare, write).await
}

/// Returns how these endpoints tokenise texts.
fn form(state: &ServerState) -> Result<TextForm<'_>, ApiError> {
    check_vectors(&state.config)?;
    Ok(TextForm {
        add_special_tokens: None,
        prefix: prompt(&state.config, None)?,
    })
}

/// The hidden states of a call's texts.
struct Vectors {
    model: String,
    values: Vec<corella_core::HiddenState>,
    num_dimensions: usize,
    usage: PoolingUsage,
}

/// Computes the hidden states of the texts from `prepare`; `write` makes the answer. A call without a text only asks to
/// load the model, which is loaded already.
async fn vectors(
    state: &Arc<ServerState>,
    context: &CallContext,
    body: Body,
    field: &'static str,
    prepare: impl FnOnce(RequestBody, &ServerState, &Caller) -> Result<Texts, ApiError> + Send + 'static,
    write: impl FnOnce(Vectors, &ServeConfig) -> Response + Send + 'static,
) -> Result<Response, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = RequestBody::read(body, state).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |state: &ServerState, caller: &Caller| prepare(body, state, caller);
    let texts = state.run_blocking(num_bytes, prepare).await?;
    let params = PoolingParams {
        pooling: state.config.default_pooling(),
        priority: 0,
        namespace: Namespace::default(),
        adapter: None,
    };
    let prompts = (texts.prompts, field);
    let pooled = pool(state, context, prompts, &texts.model, params, timer).await?;
    let num_bytes = pooled.states.len() * size_of::<f32>() * texts.num_dimensions;
    let vectors = Vectors {
        model: texts.model,
        values: pooled.states,
        num_dimensions: texts.num_dimensions,
        usage: pooled.usage,
    };
    // A million numbers take some tens of milliseconds as JSON.
    let write = move |server: &ServerState, _: &Caller| Ok(write(vectors, &server.config));
    state.run_blocking(num_bytes, write).await
}

fn is_empty(prompt: &Prompt) -> bool {
    match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(tokens) => tokens.is_empty(),
    }
}

#[derive(Serialize)]
struct EmbedAnswer {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// In nanoseconds, like all durations of this API.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u64,
}

#[derive(Serialize)]
struct OlderAnswer {
    embedding: Vec<f32>,
}
