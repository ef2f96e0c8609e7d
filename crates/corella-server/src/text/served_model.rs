//! The served model as requests see it: its names, its limits and its text.

use std::sync::{Arc, OnceLock};

use corella_core::TokenId;
use corella_text::{
    ChatTemplate, EncodeLimit, EncodedPair, GrammarCompiler, RenderLimit, ReplyFormat, TextError,
    Tokenizer,
};

use crate::adapter::served_adapter::ServedAdapters;
use crate::config::serve_config::{ServeConfig, TextModel};
use crate::config::server_config::ServerConfig;
use crate::text::caller_grammars::CallerGrammars;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::Endpoint;

pub struct ServedModel {
    pub server: Arc<ServerConfig>,
    pub config: Arc<ServeConfig>,
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub reply_format: ReplyFormat,
    pub adapters: ServedAdapters,
    /// Whether `kv_transfer_params` are read.
    takes_kv_transfer: bool,
    /// The compiler of grammars. It is made for the first request that needs it, because reading the vocabulary takes
    /// time.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
}

impl ServedModel {
    pub fn new(
        server: Arc<ServerConfig>,
        config: Arc<ServeConfig>,
        text: TextModel,
        adapters: ServedAdapters,
        takes_kv_transfer: bool,
    ) -> Self {
        Self {
            server,
            config,
            tokenizer: text.tokenizer,
            chat_template: text.chat_template,
            reply_format: text.reply_format,
            adapters,
            takes_kv_transfer,
            grammars: OnceLock::new(),
        }
    }

    pub fn field_check(&self, endpoint: Endpoint) -> FieldCheck {
        FieldCheck {
            endpoint,
            allow_unknown_fields: self.server.allow_unknown_fields,
            takes_kv_transfer: self.takes_kv_transfer,
        }
    }

    /// Checks `model`, which may name the model or an adapter, or be absent.
    pub fn check_name(&self, model: Option<&str>) -> Result<String, ApiError> {
        let config = &self.config;
        match model {
            None => Ok(config.model_name().to_owned()),
            Some(model)
                if config
                    .served_model_names
                    .iter()
                    .chain(&config.other_names)
                    .any(|name| name == model)
                    || self.adapters.get(model).is_some() =>
            {
                Ok(model.to_owned())
            }
            Some(model) => Err(ApiError::model_not_found(model, &config.served_model_names)),
        }
    }

    /// Tokenises a text, within the context. A tokenizer may have tokens that the model lacks; a text with such tokens
    /// is refused, because they would fail the whole step.
    pub fn encode(
        &self,
        param: &str,
        text: &str,
        add_special_tokens: bool,
        caller: &Caller,
    ) -> Result<Vec<TokenId>, ApiError> {
        let limit = EncodeLimit {
            max_tokens: self.config.max_model_len as usize,
            is_abandoned: &|| caller.has_left(),
        };
        let tokens = self
            .tokenizer
            .encode_within(text, add_special_tokens, limit)
            .map_err(|error| self.text_error(param, error))?;
        self.check_known(param, &tokens)?;
        Ok(tokens)
    }

    /// Tokenises two texts for a model that reads both at once, as `encode` does with one.
    pub fn encode_pair(
        &self,
        param: &str,
        pair: (&str, &str),
        add_special_tokens: bool,
        caller: &Caller,
    ) -> Result<EncodedPair, ApiError> {
        let limit = EncodeLimit {
            max_tokens: self.config.max_model_len as usize,
            is_abandoned: &|| caller.has_left(),
        };
        let encoded = self.tokenizer.encode_pair(pair, add_special_tokens, limit);
        let encoded = encoded.map_err(|error| self.text_error(param, error))?;
        self.check_known(param, &encoded.tokens)?;
        Ok(encoded)
    }

    fn text_error(&self, param: &str, error: TextError) -> ApiError {
        match error {
            TextError::TooManyTokens { at_least } => {
                ApiError::prompt_too_long(param, at_least, self.config.max_model_len)
            }
            error => ApiError::invalid(param, error.to_string()),
        }
    }

    fn check_known(&self, param: &str, tokens: &[TokenId]) -> Result<(), ApiError> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(token) => Err(ApiError::invalid(
                param,
                format!("holds token {token}, but the model has only {vocab_size} tokens"),
            )),
        }
    }

    /// Returns the compiler of grammars for the model's vocabulary. Compiling stops when `caller` leaves.
    pub fn grammars<'a>(&'a self, caller: &'a Caller) -> Result<CallerGrammars<'a>, ApiError> {
        let grammars = self.grammars.get_or_init(|| {
            let new = GrammarCompiler::new(&self.tokenizer, self.config.vocab_size);
            new.inspect_err(|error| tracing::error!(error, "the vocabulary takes no grammars"))
        });
        match grammars {
            Ok(compiler) => Ok(CallerGrammars { compiler, caller }),
            Err(_) => Err(ApiError::engine(
                "Grammars cannot be applied to the vocabulary of this model.",
            )),
        }
    }

    /// Limits a template's output: a little more than the context can hold, because
    /// `continue_final_message` cuts off the text after the last message.
    pub fn render_limit<'a>(&self, is_abandoned: &'a dyn Fn() -> bool) -> RenderLimit<'a> {
        const BEHIND_BYTES: usize = 64 << 10;
        // For tokenizers that do not bound the bytes of a token.
        const MAX_BYTES_PER_TOKEN: usize = 1024;
        let max_bytes_per_token = self.tokenizer.max_bytes_per_token();
        let max_bytes_per_token = max_bytes_per_token.unwrap_or(MAX_BYTES_PER_TOKEN);
        let max_bytes = max_bytes_per_token.saturating_mul(self.config.max_model_len as usize);
        RenderLimit {
            max_bytes: max_bytes.saturating_add(BEHIND_BYTES),
            is_abandoned,
        }
    }
}
