//! The configuration of a served model: its names, its limits, and the facts about it.

use std::time::Duration;

use corella_core::{Pooling, TokenId};
use corella_model::{GenerationDefaults, SentenceConfig};
use corella_text::{ChatTemplate, ReplyFormat, Tokenizer};

/// Requests that exceed a limit are refused with an error that names it.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Names of the model. The first is used in responses and metrics; the others are aliases.
    pub served_model_names: Vec<String>,
    /// Further accepted names that `/v1/models` does not list, such as Ollama's `qwen3:0.6b`.
    pub other_names: Vec<String>,
    /// The facts about the model for clients.
    pub model_facts: ModelFacts,
    pub max_model_len: u32,
    /// Limits the adapters loaded at a time.
    pub max_num_adapters: usize,
    /// Whether the adapters are those that are loaded with the model, and no others.
    pub has_fixed_adapters: bool,
    /// Number of rows of the model's embedding. A tokenizer may have more tokens, or fewer.
    pub vocab_size: usize,
    /// Length of the model's hidden states.
    pub hidden_size: usize,
    /// Whether the model can generate text, which takes an output head.
    pub has_head: bool,
    /// Whether the model is an encoder, whose tokens see the whole text.
    pub is_encoder: bool,
    /// How hidden states become vectors and scores.
    pub sentence: SentenceConfig,
    pub end_token_ids: Vec<TokenId>,
    /// Defaults of the sampling fields. A field without a default here has OpenAI's default.
    pub generation_defaults: GenerationDefaults,
    /// The server's seed. This seed and a request's number determine the seed of a request without `seed`. With `None`,
    /// such a request gets a random seed.
    pub seed: Option<u64>,
    /// Limits the alternatives of `logprobs`.
    pub max_logprobs: u32,
    /// Limits the choices of one API call: the number of its prompts times `n`.
    pub max_num_choices: u32,
    /// Limits the time to read an adapter.
    pub adapter_load_timeout: Duration,
}

impl ServeConfig {
    pub fn new(
        served_model_name: impl Into<String>,
        max_model_len: u32,
        vocab_size: usize,
        hidden_size: usize,
    ) -> Self {
        Self {
            served_model_names: vec![served_model_name.into()],
            other_names: Vec::new(),
            model_facts: ModelFacts::default(),
            max_model_len,
            max_num_adapters: 16,
            has_fixed_adapters: false,
            vocab_size,
            hidden_size,
            has_head: true,
            is_encoder: false,
            sentence: SentenceConfig::default(),
            end_token_ids: Vec::new(),
            generation_defaults: GenerationDefaults::default(),
            seed: None,
            max_logprobs: 20,
            max_num_choices: 256,
            adapter_load_timeout: Duration::from_secs(300),
        }
    }

    pub(crate) fn model_name(&self) -> &str {
        self.served_model_names
            .first()
            .map_or("default", String::as_str)
    }

    /// Returns the length of the model's vectors.
    pub(crate) fn vector_len(&self) -> usize {
        self.sentence.head.output_len(self.hidden_size)
    }

    /// Returns the default pooling of hidden states: the one in the model's files, else the mean for an encoder, as in
    /// sentence-transformers, and the last token for a decoder.
    pub(crate) fn default_pooling(&self) -> Pooling {
        let unsaid = match self.is_encoder {
            true => Pooling::Mean,
            false => Pooling::LastToken,
        };
        self.sentence.pooling.unwrap_or(unsaid)
    }

    /// Returns the names that permit the use of `name`: an API key needs only one of them. For a served name, these are
    /// the name and all short names (`other_names`). For a short name, these are all served names and all short names.
    pub(crate) fn names_like<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        names_like(&self.served_model_names, &self.other_names, name)
    }
}

/// Returns the names that permit the use of `name`, of a model with these served names and short names.
pub fn names_like<'a>(
    served: &'a [String],
    short: &'a [String],
    name: &'a str,
) -> impl Iterator<Item = &'a str> {
    let is_among = |names: &[String]| names.iter().any(|known| known == name);
    let (served, short) = match (is_among(short), is_among(served)) {
        (true, _) => (served, short),
        (false, true) => (&[][..], short),
        (false, false) => (&[][..], &[][..]),
    };
    served.iter().chain(short).map(String::as_str).chain([name])
}

/// The facts about a model. An empty text or 0 means unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// The family of the architecture, such as `qwen3`.
    pub family: String,
    pub num_parameters: u64,
    /// Size of the model's files, in bytes.
    pub file_bytes: u64,
    /// Size of the weights in memory, in bytes.
    pub weight_bytes: u64,
    /// The part of `weight_bytes` that is in the memory of a GPU.
    pub gpu_weight_bytes: u64,
    /// The format of the weights in memory, such as `int8`.
    pub weight_format: String,
    /// The format of keys and values, such as `bf16`.
    pub kv_format: String,
}

/// The tokenizer and the chat template of the model.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// Without a chat template, the server takes no conversations.
    pub chat_template: Option<ChatTemplate>,
    /// How the model marks tool calls and reasoning in its replies.
    pub reply_format: ReplyFormat,
}
