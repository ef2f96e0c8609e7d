//! What the server must know about the model and about its own limits.

use std::time::Duration;

use corella_core::TokenId;
use corella_text::{ChatTemplate, Tokenizer};
use serde_json::Value;

/// Limits are hard: what exceeds one is refused with an error that names it.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The first is the name in responses and metrics; the others are aliases.
    pub served_model_names: Vec<String>,
    /// Bearer token of everything that costs or changes something; `None` is open.
    pub api_key: Option<String>,
    pub max_model_len: u32,
    pub end_token_ids: Vec<TokenId>,
    pub generation_defaults: GenerationDefaults,
    /// Most alternatives that `logprobs` may ask for.
    pub max_logprobs: u32,
    /// Choices of one API call: its prompts times `n`.
    pub max_num_choices: u32,
    pub max_body_bytes: usize,
    /// From the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// For complete request headers, and for the next request of an idle connection.
    pub header_timeout: Duration,
    pub max_num_connections: usize,
    /// What running requests get between a signal to stop and the end.
    pub grace_period: Duration,
}

impl ServeConfig {
    pub fn new(served_model_name: impl Into<String>, max_model_len: u32) -> Self {
        Self {
            served_model_names: vec![served_model_name.into()],
            api_key: None,
            max_model_len,
            end_token_ids: Vec::new(),
            generation_defaults: GenerationDefaults::default(),
            max_logprobs: 20,
            max_num_choices: 256,
            max_body_bytes: 8 << 20,
            body_timeout: Duration::from_secs(60),
            header_timeout: Duration::from_secs(60),
            max_num_connections: 16_384,
            grace_period: Duration::from_secs(30),
        }
    }

    pub(crate) fn model_name(&self) -> &str {
        self.served_model_names
            .first()
            .map_or("default", String::as_str)
    }
}

/// What a request that says nothing gets: the model's `generation_config.json` first, then
/// OpenAI's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// Values of another type, or that no request could ask for, are passed over.
    pub fn from_generation_config(config: &Value) -> Self {
        let float = |key: &str, valid: fn(f32) -> bool| {
            config[key]
                .as_f64()
                .map(|value| value as f32)
                .filter(|value| valid(*value))
        };
        Self {
            temperature: float("temperature", |value| value.is_finite() && value >= 0.0),
            top_p: float("top_p", |value| value > 0.0 && value <= 1.0),
            top_k: config["top_k"]
                .as_u64()
                .and_then(|value| value.try_into().ok()),
            min_p: float("min_p", |value| (0.0..=1.0).contains(&value)),
            repetition_penalty: float("repetition_penalty", |value| {
                value.is_finite() && value > 0.0
            }),
        }
    }
}

/// What turns messages and text into tokens, and tokens into text.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// Without one, only `/v1/completions` serves.
    pub chat_template: Option<ChatTemplate>,
}
