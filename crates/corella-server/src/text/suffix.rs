//! Filling in the middle: the text after the generated one.

use corella_core::TokenId;
use corella_text::FillInMiddle;

use crate::text::prompt::Prompt;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;

/// The text after the generated one, and the tokens that mark it for the model.
pub struct Suffix {
    text: String,
    tokens: FillInMiddle,
}

impl Suffix {
    /// An empty suffix counts as absent.
    pub fn checked(
        served: &ServedModel,
        suffix: Option<String>,
        echo: bool,
    ) -> Result<Option<Self>, ApiError> {
        let Some(text) = suffix.filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        let Some(tokens) = FillInMiddle::of(&served.tokenizer) else {
            return Err(ApiError::invalid(
                "suffix",
                "this model cannot fill in the middle: its vocabulary has no tokens for it",
            ));
        };
        match echo {
            true => Err(ApiError::invalid("echo", "cannot be combined with suffix")),
            false => Ok(Some(Self { text, tokens })),
        }
    }

    pub fn end_token_ids(&self, served: &ServedModel) -> Vec<TokenId> {
        let mut ids = self.tokens.end_token_ids(&served.tokenizer);
        ids.retain(|&id| (id as usize) < served.config.vocab_size);
        ids
    }

    pub fn put_behind(&self, prompt: Prompt) -> Result<Prompt, ApiError> {
        match prompt {
            Prompt::Text(prefix) => Ok(Prompt::Text(self.tokens.prompt(&prefix, &self.text))),
            Prompt::Tokens(_) => Err(ApiError::invalid(
                "prompt",
                "must be text if there is a suffix",
            )),
        }
    }
}
