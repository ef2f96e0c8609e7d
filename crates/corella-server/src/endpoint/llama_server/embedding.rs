//! `/embedding`: a vector of each text, in llama-server's shape.

use axum::response::Response;
use serde::{Deserialize, Serialize};

use crate::call::call_context::CallContext;
use crate::call::pooled_call::{PooledStates, PooledTexts};
use crate::config::serve_config::ServeConfig;
use crate::endpoint::embeddings::{check_vectors, prompt, vector};
use crate::endpoint::pooling_endpoint::serve_pooled;
use crate::model_set::model_use::UsedModel;
use crate::text::pooled_prompt::{PoolingFields, TextForm, pooled_prompts};
use crate::text::prompt::PromptField;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::{RequestBody, SentBody};

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct EmbeddingFields {
    content: Option<PromptField>,
    /// The same field under OpenAI's name.
    input: Option<PromptField>,
    embd_normalize: Option<i64>,
}

/// llama-server answers with a vector for each token if a model does not pool, so `embedding` is a list of vectors.
#[derive(Serialize)]
struct Embedding {
    index: usize,
    embedding: [Vec<f32>; 1],
}

pub async fn embedding(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let prepare = |served: &ServedModel, body: &RequestBody, caller: &Caller| {
        let pooling: PoolingFields = body.parse()?;
        let fields: EmbeddingFields = body.parse()?;
        body.check_fields(served.field_check(Endpoint::LlamaEmbedding))?;
        let model = served.check_name(pooling.model.as_deref())?;
        let is_normalised = match fields.embd_normalize {
            None | Some(2) => true,
            Some(-1) => false,
            Some(_) => {
                let message = "must be 2 (a vector of length 1) or -1 (as it comes)";
                return Err(ApiError::invalid("embd_normalize", message));
            }
        };
        let params = pooling.params(&served.config)?;
        let (field, input) = match (fields.content, fields.input) {
            (Some(_), Some(_)) => {
                let message = "cannot be combined with content";
                return Err(ApiError::invalid("input", message));
            }
            (Some(content), None) => ("content", content),
            (None, Some(input)) => ("input", input),
            (None, None) => return Err(ApiError::invalid("content", "is required")),
        };
        check_vectors(&served.config)?;
        let form = TextForm {
            add_special_tokens: pooling.add_special_tokens,
            prefix: prompt(&served.config, None)?,
        };
        Ok(PooledTexts {
            prompts: pooled_prompts(served, field, input, form, caller)?,
            field,
            params,
            model,
            format: is_normalised,
        })
    };
    let write = |pooled: PooledStates<bool>, config: &ServeConfig| {
        let (states, is_normalised) = (pooled.states.iter().enumerate(), pooled.format);
        let answer: Vec<_> = states
            .map(|(index, state)| Embedding {
                index,
                embedding: [vector(config, state, config.vector_len(), is_normalised)],
            })
            .collect();
        Ok(json_response(&answer))
    };
    serve_pooled(&state, &context, body, prepare, write).await
}
