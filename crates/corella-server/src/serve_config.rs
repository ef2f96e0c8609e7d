//! What the server must know about the model and about its own limits.

use std::time::Duration;

use corella_core::TokenId;
use corella_text::{ChatTemplate, Tokenizer};

/// Limits are hard: what exceeds one is refused with an error that names it.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The first is the name in responses and metrics; the others are aliases.
    pub served_model_names: Vec<String>,
    /// Bearer token of everything that costs or changes something; `None` is open.
    pub api_key: Option<String>,
    pub max_model_len: u32,
    /// Rows of the model's embedding. A tokenizer may know more tokens, or fewer.
    pub vocab_size: usize,
    pub end_token_ids: Vec<TokenId>,
    pub generation_defaults: GenerationDefaults,
    /// Of requests that name none; `None` is another each time.
    pub seed: Option<u64>,
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
    /// Ignore fields that no API is known to have, instead of refusing them.
    pub allow_unknown_fields: bool,
    /// What running requests get between a signal to stop and the end.
    pub grace_period: Duration,
}

impl ServeConfig {
    pub fn new(
        served_model_name: impl Into<String>,
        max_model_len: u32,
        vocab_size: usize,
    ) -> Self {
        Self {
            served_model_names: vec![served_model_name.into()],
            api_key: None,
            max_model_len,
            vocab_size,
            end_token_ids: Vec::new(),
            generation_defaults: GenerationDefaults::default(),
            seed: None,
            max_logprobs: 20,
            max_num_choices: 256,
            max_body_bytes: 8 << 20,
            body_timeout: Duration::from_secs(60),
            header_timeout: Duration::from_secs(60),
            max_num_connections: 16_384,
            allow_unknown_fields: false,
            grace_period: Duration::from_secs(30),
        }
    }

    pub(crate) fn model_name(&self) -> &str {
        self.served_model_names
            .first()
            .map_or("default", String::as_str)
    }
}

/// What a request that says nothing gets: what the model's `generation_config.json` says, else
/// OpenAI's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// What turns messages and text into tokens, and tokens into text.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// Without one, only `/v1/completions` serves.
    pub chat_template: Option<ChatTemplate>,
}
