//! Log-probabilities in the formats of the two generating endpoints.

use std::collections::BTreeMap;

use corella_core::{Logprobs, TokenId};
use corella_text::Tokenizer;
use serde::Serialize;

/// Reported instead of −∞, which JSON does not have; vLLM does the same.
const LEAST_LOGPROB: f32 = -9999.0;

/// `choices[].logprobs` of `/v1/completions`, which has a column for each kind of value.
#[derive(Default, Serialize)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<f32>,
    tokens: Vec<String>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
}

impl CompletionLogprobs {
    /// `text_offset` is the position, in characters, at which the first of these tokens begins; it is
    /// advanced past the last.
    pub fn new(
        tokenizer: &Tokenizer,
        tokens: &[(TokenId, Box<Logprobs>)],
        text_offset: &mut usize,
    ) -> Self {
        let mut columns = Self::default();
        for (token, logprobs) in tokens {
            let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
            columns.text_offset.push(*text_offset);
            // A character counts for the token in which it begins; a token may only hold the rest of one.
            *text_offset += bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
            columns.tokens.push(text_of(bytes));
            columns.token_logprobs.push(finite(logprobs.token));
            let mut top: BTreeMap<_, _> = logprobs
                .top
                .iter()
                .map(|&(token, logprob)| {
                    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
                    (text_of(bytes), finite(logprob))
                })
                .collect();
            top.insert(text_of(bytes), finite(logprobs.token));
            columns.top_logprobs.push(top);
        }
        columns
    }
}

/// `choices[].logprobs` of `/v1/chat/completions`, which has a row for each token.
#[derive(Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatLogprob>,
}

#[derive(Serialize)]
struct ChatLogprob {
    #[serde(flatten)]
    token: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub fn new(tokenizer: &Tokenizer, tokens: &[(TokenId, Box<Logprobs>)]) -> Self {
        let row = |(token, logprobs): &(TokenId, Box<Logprobs>)| ChatLogprob {
            token: TokenLogprob::new(tokenizer, *token, logprobs.token),
            top_logprobs: logprobs
                .top
                .iter()
                .map(|&(token, logprob)| TokenLogprob::new(tokenizer, token, logprob))
                .collect(),
        };
        Self {
            content: tokens.iter().map(row).collect(),
        }
    }
}

impl TokenLogprob {
    fn new(tokenizer: &Tokenizer, token: TokenId, logprob: f32) -> Self {
        let bytes = tokenizer.token_bytes(token).unwrap_or_default();
        Self {
            token: text_of(bytes),
            logprob: finite(logprob),
            bytes: bytes.to_vec(),
        }
    }
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST_LOGPROB)
}
