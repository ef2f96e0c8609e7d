//! `/v1/embeddings` and `/pooling`: a vector for each input, from the model's hidden states.

use std::sync::Arc;

use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::call::call_context::CallContext;
use crate::call::pooled_call::{PooledStates, PooledTexts, PoolingUsage};
use crate::clock::unix_now_s;
use crate::config::serve_config::ServeConfig;
use crate::endpoint::pooling_endpoint::serve_pooled;
use crate::model_set::model_use::UsedModel;
use crate::state::server_state::ServerState;
use crate::text::pooled_prompt::{PoolingFields, TextForm, pooled_prompts};
use crate::text::prompt::PromptField;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::{RequestBody, SentBody};

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct EmbeddingFields {
    input: Option<PromptField>,
    encoding_format: Option<EncodingFormat>,
    dimensions: Option<usize>,
    normalize: Option<bool>,
    /// The name of the model's prompt to write before the texts.
    prompt_name: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    Float,
    Base64,
}

pub async fn embeddings(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    vectors(state, context, body, Endpoint::Embeddings).await
}

/// vLLM's endpoint for the same vectors.
pub async fn pooling(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    vectors(state, context, body, Endpoint::Pooling).await
}

async fn vectors(
    state: Arc<ServerState>,
    context: CallContext,
    body: SentBody,
    endpoint: Endpoint,
) -> Result<Response, ApiError> {
    let is_pooling = endpoint == Endpoint::Pooling;
    let (id_prefix, object) = match is_pooling {
        true => ("pool", "pooling"),
        false => ("embd", "embedding"),
    };
    let id = format!("{id_prefix}-{}", context.name);
    let prepare = move |served: &ServedModel, body: &RequestBody, caller: &Caller| {
        let pooling: PoolingFields = body.parse()?;
        let fields: EmbeddingFields = body.parse()?;
        body.check_fields(served.field_check(endpoint))?;
        let model = served.check_name(pooling.model.as_deref())?;
        check_vectors(&served.config)?;
        let format = VectorFormat {
            encoding: fields.encoding_format.unwrap_or(EncodingFormat::Float),
            num_dimensions: check_dimensions(fields.dimensions, &served.config)?,
            is_normalised: { fields.normalize }.unwrap_or(is_normalised(&served.config)),
        };
        let params = pooling.params(&served.config)?;
        let input = required("input", fields.input)?;
        let form = TextForm {
            add_special_tokens: pooling.add_special_tokens,
            prefix: prompt(&served.config, fields.prompt_name.as_deref())?,
        };
        Ok(PooledTexts {
            prompts: pooled_prompts(served, "input", input, form, caller)?,
            field: "input",
            params,
            model,
            format,
        })
    };
    let write = move |pooled: PooledStates<VectorFormat>, config: &ServeConfig| {
        let data = pooled.states.iter().enumerate();
        let data = data.map(|(index, state)| {
            let vector = pooled.format.vector(state, config);
            let (embedding, data) = match is_pooling {
                true => (None, Some(vector)),
                false => (Some(vector), None),
            };
            Embedding {
                object,
                index,
                embedding,
                data,
            }
        });
        Ok(json_response(&Embeddings {
            id: &id,
            object: "list",
            created: unix_now_s(),
            model: &pooled.model,
            data: data.collect(),
            usage: pooled.usage,
        }))
    };
    serve_pooled(&state, &context, body, prepare, write).await
}

/// Converts a hidden state to a vector of the answer.
#[derive(Clone, Copy)]
struct VectorFormat {
    encoding: EncodingFormat,
    /// The number of values that are kept, from the first on.
    num_dimensions: usize,
    /// Whether the kept values are then scaled to length 1.
    is_normalised: bool,
}

impl VectorFormat {
    fn vector(self, state: &[f32], config: &ServeConfig) -> Vector {
        let values = vector(config, state, self.num_dimensions, self.is_normalised);
        match self.encoding {
            EncodingFormat::Float => Vector::Float(values),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
                Vector::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

/// Returns the number of values kept of a vector: all of them, unless the request asks for fewer.
pub fn check_dimensions(asked: Option<usize>, config: &ServeConfig) -> Result<usize, ApiError> {
    let len = config.vector_len();
    match asked {
        Some(dimensions) if !(1..=len).contains(&dimensions) => {
            let what = match config.sentence.head.is_empty() {
                true => "the model's hidden size",
                false => "the length of the model's vectors",
            };
            Err(ApiError::invalid(
                "dimensions",
                format!("must be between 1 and {len}, {what}"),
            ))
        }
        _ => Ok(asked.unwrap_or(len)),
    }
}

/// Refuses a model with a classification head, because such a model makes no vectors.
pub fn check_vectors(config: &ServeConfig) -> Result<(), ApiError> {
    match &config.sentence.classes {
        None => Ok(()),
        Some(_) => Err(ApiError::no_vectors(config)),
    }
}

/// Returns whether vectors have length 1 by default. They do unless the model's files say otherwise.
pub fn is_normalised(config: &ServeConfig) -> bool {
    config.sentence.is_normalised.unwrap_or(true)
}

/// Returns the text before each input: the prompt of this name, or the model's default.
pub fn prompt<'a>(config: &'a ServeConfig, name: Option<&str>) -> Result<&'a str, ApiError> {
    let sentence = &config.sentence;
    let Some(name) = name.or(sentence.default_prompt.as_deref()) else {
        return Ok("");
    };
    let found = sentence.prompts.get(name);
    found.map(String::as_str).ok_or_else(|| {
        let names: Vec<&str> = sentence.prompts.keys().map(String::as_str).collect();
        let message = match names.is_empty() {
            true => String::from("this model has no prompts"),
            false => format!("must be one of the model's prompts: {}", names.join(", ")),
        };
        ApiError::invalid("prompt_name", message)
    })
}

/// Returns the first values of a hidden state's vector, scaled to length 1 if asked.
pub fn vector(
    config: &ServeConfig,
    state: &[f32],
    num_dimensions: usize,
    is_normalised: bool,
) -> Vec<f32> {
    let mut values = config.sentence.head.apply(state);
    values.truncate(num_dimensions);
    if is_normalised {
        normalise(&mut values);
    }
    values
}

/// Scales a vector to length 1. A vector of zeros stays unchanged.
fn normalise(values: &mut [f32]) {
    let sum: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
    if sum > 0.0 {
        let length = sum.sqrt();
        for value in values {
            *value = (f64::from(*value) / length) as f32;
        }
    }
}

#[derive(Serialize)]
struct Embeddings<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<Embedding>,
    usage: PoolingUsage,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<Vector>,
    /// The vector's field in answers of `/pooling`.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Vector>,
}

/// Numbers, or base64 of their bytes as little-endian 32-bit floats.
#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}
