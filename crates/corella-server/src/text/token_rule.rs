//! The fields about single tokens: `logit_bias`, `allowed_token_ids` and `bad_words`.

use std::collections::BTreeMap;
use std::sync::Arc;

use corella_core::{TokenId, TokenRules};

use crate::text::prompt_tokens::check_token_ids;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_limit::{
    LOGIT_BIAS, MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS,
};

/// The fields as sent.
#[derive(Debug, Default)]
pub struct TokenRuleFields {
    /// The biases by token id. The ids are strings, because JSON has no other keys.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub allowed_token_ids: Option<Vec<TokenId>>,
    pub bad_words: Option<Vec<String>>,
}

/// Limits `logit_bias`. OpenAI documents no limit, but a request carries its biases to every node that draws for it.
const MAX_BIASES: usize = 1024;

impl TokenRuleFields {
    /// Checks the fields and tokenises the bad words. Returns `None` if there are no rules.
    pub fn checked(
        self,
        served: &ServedModel,
        caller: &Caller,
    ) -> Result<Option<Arc<TokenRules>>, ApiError> {
        let vocab_size = served.config.vocab_size;
        let bias = biases(self.logit_bias.unwrap_or_default(), vocab_size)?;
        let banned = banned_sequences(self.bad_words.unwrap_or_default(), served, caller)?;
        let mut rules = TokenRules::new().with_bias(bias).with_banned(banned);
        if let Some(allowed) = self.allowed_token_ids {
            check_allowed(&allowed, vocab_size)?;
            rules = rules.with_allowed(allowed);
        }
        Ok((!rules.is_empty()).then(|| Arc::new(rules)))
    }
}

fn biases(
    fields: BTreeMap<String, f64>,
    vocab_size: usize,
) -> Result<Vec<(TokenId, f32)>, ApiError> {
    if fields.len() > MAX_BIASES {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("at most {MAX_BIASES} tokens are allowed"),
        ));
    }
    let bias = |(token, bias): (String, f64)| {
        // A number in JSON has no plus sign.
        let digits = Some(&token).filter(|token| !token.starts_with('+'));
        let id = digits.and_then(|token| token.parse::<TokenId>().ok());
        let id = id.filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
            ApiError::invalid(
                "logit_bias",
                format!("`{token:.20}` is not a token id of the vocabulary of {vocab_size}"),
            )
        })?;
        match LOGIT_BIAS.contains(bias) {
            true => Ok((id, bias as f32)),
            false => Err(ApiError::invalid(
                format!("logit_bias.{id}"),
                format!("must be {LOGIT_BIAS}, not {bias}"),
            )),
        }
    };
    // Several spellings of an id, such as 7 and 07, mean one token.
    let biases: BTreeMap<_, _> = fields.into_iter().map(bias).collect::<Result<_, _>>()?;
    Ok(biases.into_iter().collect())
}

fn check_allowed(allowed: &[TokenId], vocab_size: usize) -> Result<(), ApiError> {
    const FIELD: &str = "allowed_token_ids";
    if allowed.is_empty() {
        return Err(ApiError::invalid(
            FIELD,
            "must have at least one token; leave it out to allow all",
        ));
    }
    if allowed.len() > MAX_ALLOWED_TOKEN_IDS {
        return Err(ApiError::invalid(
            FIELD,
            format!("at most {MAX_ALLOWED_TOKEN_IDS} are allowed"),
        ));
    }
    check_token_ids(FIELD, allowed, vocab_size)
}

/// Returns each word's tokens at the beginning of a text and after a space. vLLM leaves out the second form unless it
/// is as long as the first and begins differently; Corella bans both.
fn banned_sequences(
    words: Vec<String>,
    served: &ServedModel,
    caller: &Caller,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    if words.len() > MAX_BAD_WORDS {
        return Err(ApiError::invalid(
            "bad_words",
            format!("at most {MAX_BAD_WORDS} are allowed"),
        ));
    }
    let mut banned = Vec::with_capacity(2 * words.len());
    for (index, word) in words.iter().enumerate() {
        let field = format!("bad_words[{index}]");
        let bare = word.trim_start_matches(' ');
        if bare.is_empty() || word.len() > MAX_BAD_WORD_BYTES {
            return Err(ApiError::invalid(
                field,
                format!("must have between 1 and {MAX_BAD_WORD_BYTES} bytes, and not only spaces"),
            ));
        }
        for text in [bare, &format!(" {bare}")] {
            let tokens = served.encode(&field, text, false, caller)?;
            if !banned.contains(&tokens) {
                banned.push(tokens);
            }
        }
    }
    Ok(banned)
}
