//! `/v1/embeddings` and `/pooling`: a vector for each input, made of the model's hidden states.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{check_model, json_response};
use crate::field_table::Endpoint;
use crate::metrics::CallTimer;
use crate::pooled_call::{PoolingFields, PoolingUsage, pool, pooled_prompts};
use crate::prompt::PromptField;
use crate::request_body::RequestBody;
use crate::serve_config::ServeConfig;
use crate::server_state::{ServerState, unix_now_s};
use crate::text_thread::Caller;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct EmbeddingFields {
    input: Option<PromptField>,
    encoding_format: Option<EncodingFormat>,
    dimensions: Option<usize>,
    normalize: Option<bool>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    Float,
    Base64,
}

pub async fn embeddings(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    vectors(state, context, body, Endpoint::Embeddings).await
}

/// vLLM's endpoint for the same vectors.
pub async fn pooling(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    vectors(state, context, body, Endpoint::Pooling).await
}

async fn vectors(
    state: Arc<ServerState>,
    context: CallContext,
    body: Body,
    endpoint: Endpoint,
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
        body.check_fields(state.field_check(endpoint))?;
        let model = check_model(state, pooling.model.as_deref())?;
        let format = VectorFormat {
            encoding: fields.encoding_format.unwrap_or(EncodingFormat::Float),
            num_dimensions: check_dimensions(fields.dimensions, &state.config)?,
            is_normalised: fields.normalize.unwrap_or(true),
        };
        let params = pooling.params()?;
        let Some(input) = fields.input else {
            return Err(ApiError::invalid("input", "is required"));
        };
        let add_special_tokens = pooling.add_special_tokens;
        let prompts = pooled_prompts(state, "input", input, add_special_tokens, caller)?;
        Ok((prompts, params, model, format))
    };
    let (prompts, params, model, format) = state.run_blocking(num_bytes, prepare).await?;
    let pooled = pool(&state, &context, (prompts, "input"), &model, params, timer).await?;
    let num_bytes = pooled.states.len() * size_of::<f32>() * format.num_dimensions;
    let is_pooling = endpoint == Endpoint::Pooling;
    let (id_prefix, object) = match is_pooling {
        true => ("pool", "pooling"),
        false => ("embd", "embedding"),
    };
    let id = format!("{id_prefix}-{}", context.name);
    // As JSON, a million numbers take some tens of milliseconds.
    let write = move |_: &ServerState, _: &Caller| {
        let data = pooled.states.iter().enumerate();
        let data = data.map(|(index, state)| {
            let vector = format.vector(state);
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
            model: &model,
            data: data.collect(),
            usage: pooled.usage,
        }))
    };
    state.run_blocking(num_bytes, write).await
}

/// How a hidden state becomes a vector of the answer.
#[derive(Clone, Copy)]
struct VectorFormat {
    encoding: EncodingFormat,
    /// The first so many values are kept.
    num_dimensions: usize,
    /// Whether the length of what is kept is then made 1.
    is_normalised: bool,
}

impl VectorFormat {
    fn vector(self, state: &[f32]) -> Vector {
        let values = vector(state, self.num_dimensions, self.is_normalised);
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

/// How many values of a hidden state are kept: all of them, unless fewer are asked for.
pub fn check_dimensions(asked: Option<usize>, config: &ServeConfig) -> Result<usize, ApiError> {
    let hidden_size = config.hidden_size;
    match asked {
        Some(dimensions) if !(1..=hidden_size).contains(&dimensions) => Err(ApiError::invalid(
            "dimensions",
            format!("must be between 1 and {hidden_size}, the model's hidden size"),
        )),
        _ => Ok(asked.unwrap_or(hidden_size)),
    }
}

/// The first values of a hidden state; whether their length is then made 1.
pub fn vector(state: &[f32], num_dimensions: usize, is_normalised: bool) -> Vec<f32> {
    let mut values = state[..num_dimensions.min(state.len())].to_vec();
    if is_normalised {
        normalise(&mut values);
    }
    values
}

/// Makes the length of a vector 1. A vector of zeros stays as it is.
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
    /// The name of the vector in answers of `/pooling`.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Vector>,
}

/// The numbers, or the bytes of numbers of 32 bits, the lowest byte first.
#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}
