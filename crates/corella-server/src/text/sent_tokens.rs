//! The field `tokens` of a conversation: the prompt's tokens, as another server has rendered them. llm-d's coordinator
//! sends them, so that all servers of a request read the same prompt.

use corella_core::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::serve_config::ServeConfig;
use crate::text::prompt_tokens::{check_num_tokens, check_token_ids};
use crate::wire::api_error::{ApiError, required};

#[derive(Deserialize)]
#[serde(expecting = "an object", deny_unknown_fields)]
pub struct SentTokens {
    token_ids: Option<Vec<TokenId>>,
    /// Features of images and sounds. They have no members for a text.
    features: Option<Map<String, Value>>,
}

impl SentTokens {
    /// Returns the prompt's tokens.
    pub fn checked(self, config: &ServeConfig) -> Result<Vec<TokenId>, ApiError> {
        const IDS: &str = "tokens.token_ids";
        let is_empty = |value: &Value| match value {
            Value::Object(members) => members.is_empty(),
            value => value.is_null(),
        };
        if !self.features.iter().flat_map(Map::values).all(is_empty) {
            let advice = "models read and write text only";
            return Err(ApiError::unsupported("tokens.features", advice));
        }
        let tokens = required(IDS, self.token_ids)?;
        if tokens.is_empty() {
            return Err(ApiError::invalid(IDS, "must not be empty"));
        }
        check_num_tokens(IDS, tokens.len(), config)?;
        check_token_ids(IDS, &tokens, config.vocab_size)?;
        Ok(tokens)
    }
}
