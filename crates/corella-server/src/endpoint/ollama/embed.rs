//! `/api/embed`: a vector for each text; and `/api/embeddings`, its older form for one text.

use std::time::Instant;

use axum::response::Response;
use corella_core::Namespace;
use serde::{Deserialize, Serialize};

use crate::call::call_context::CallContext;
use crate::call::pooled_call::{PooledStates, PooledTexts};
use crate::config::serve_config::ServeConfig;
use crate::endpoint::embeddings::{check_dimensions, check_vectors, prompt, vector};
use crate::endpoint::pooling_endpoint::serve_pooled;
use crate::model_set::model_use::UsedModel;
use crate::text::pooled_prompt::{PoolingParams, TextForm, pooled_prompts};
use crate::text::prompt::{Prompt, PromptField};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::{RequestBody, SentBody};

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

/// Vectors are cut to `dimensions` and then scaled to length 1.
pub async fn embed(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let prepare = |served: &ServedModel, body: &RequestBody, caller: &Caller| {
        check_options(body, served, caller, Endpoint::OllamaEmbed)?;
        let fields: EmbedFields = body.parse()?;
        let num_dimensions = check_dimensions(fields.dimensions, &served.config)?;
        let PromptField(mut inputs) = fields.input.unwrap_or(PromptField(Vec::new()));
        if let [input] = &*inputs
            && is_empty(input)
        {
            inputs.clear();
        }
        let mut texts = texts(served, fields.model, "input", inputs, caller)?;
        texts.format = num_dimensions;
        Ok(texts)
    };
    let write = move |pooled: PooledStates<usize>, config: &ServeConfig| {
        let answer = EmbedAnswer {
            embeddings: { pooled.states.iter() }
                .map(|state| vector(config, state, pooled.format, true))
                .collect(),
            total_duration: start.elapsed().as_nanos() as u64,
            load_duration: 0,
            prompt_eval_count: pooled.usage.prompt_tokens,
            model: pooled.model,
        };
        Ok(json_response(&answer))
    };
    serve_pooled(&state, &context, body, prepare, write).await
}

/// Serves `/api/embeddings`. The vector is not scaled.
pub async fn embeddings(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let prepare = |served: &ServedModel, body: &RequestBody, caller: &Caller| {
        check_options(body, served, caller, Endpoint::OllamaEmbeddings)?;
        let fields: OlderFields = body.parse()?;
        let text = fields.prompt.filter(|prompt| !prompt.is_empty());
        let text = text.map(Prompt::Text).into_iter().collect();
        texts(served, fields.model, "prompt", text, caller)
    };
    let write = |pooled: PooledStates<usize>, config: &ServeConfig| {
        let first = pooled.states.first();
        Ok(json_response(&OlderAnswer {
            embedding: first.map_or_else(Vec::new, |state| {
                vector(config, state, pooled.format, false)
            }),
        }))
    };
    serve_pooled(&state, &context, body, prepare, write).await
}

/// Tokenises the texts of a field for vectors of full length. A call without a text only asks to load the model, which
/// is loaded already.
fn texts(
    served: &ServedModel,
    model: Option<String>,
    field: &'static str,
    texts: Vec<Prompt>,
    caller: &Caller,
) -> Result<PooledTexts<usize>, ApiError> {
    let config = &served.config;
    let model = served_model(served, model.as_deref())?;
    check_vectors(config)?;
    let form = TextForm {
        add_special_tokens: None,
        prefix: prompt(config, None)?,
    };
    Ok(PooledTexts {
        prompts: pooled_prompts(served, field, PromptField(texts), form, caller)?,
        field,
        params: PoolingParams {
            pooling: config.default_pooling(),
            priority: 0,
            namespace: Namespace::default(),
            adapter: None,
        },
        model,
        format: config.vector_len(),
    })
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
