//! Log-probabilities in the formats of the two generating endpoints.

use std::collections::BTreeMap;

use corella_core::{Logprobs, TokenId};
use corella_text::Tokenizer;
use serde::Serialize;

use crate::scored_prompt::ScoredPrompt;

/// Reported instead of −∞, which JSON does not have; vLLM does the same.
const LEAST_LOGPROB: f32 = -9999.0;

/// `choices[].logprobs` of `/v1/completions`, which has a column for each kind of value.
#[derive(Default, Serialize)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    /// The first token of an echoed prompt has none.
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
}

impl CompletionLogprobs {
    /// `text_offset` is the position, in characters, at which the first of these tokens begins; it is
    /// advanced past the last.
    pub fn push_output(
        &mut self,
        tokenizer: &Tokenizer,
        tokens: &[(TokenId, Box<Logprobs>)],
        text_offset: &mut usize,
    ) {
        for (token, logprobs) in tokens {
            self.push(
                tokenizer,
                *token,
                Some((&**logprobs, usize::MAX)),
                *text_offset,
            );
            let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
            *text_offset += num_chars(bytes);
        }
    }

    /// Adds an echoed prompt, with which `text` begins, and `num_top` alternatives to each token.
    pub fn push_prompt(
        &mut self,
        tokenizer: &Tokenizer,
        prompt: &ScoredPrompt,
        num_top: usize,
        text: &str,
        text_offset: &mut usize,
    ) {
        let mut rest = text.as_bytes();
        let others = prompt.others.iter();
        let others = others.map(|scored| (scored.token, Some((&scored.logprobs, num_top))));
        for (token, logprobs) in [(prompt.first, None)].into_iter().chain(others) {
            self.push(tokenizer, token, logprobs, *text_offset);
            let (own, behind) = rest.split_at(num_bytes_in(rest, tokenizer, token));
            *text_offset += num_chars(own);
            rest = behind;
        }
    }

    fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: TokenId,
        logprobs: Option<(&Logprobs, usize)>,
        text_offset: usize,
    ) {
        let text = |token| text_of(tokenizer.token_bytes(token).unwrap_or_default());
        self.text_offset.push(text_offset);
        self.tokens.push(text(token));
        let logprob = logprobs.map(|(logprobs, _)| finite(logprobs.token));
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(logprobs.map(|(logprobs, num_top)| {
            let top = logprobs.top.iter().take(num_top);
            let own = (token, logprobs.token);
            { top.chain([&own]) }
                .map(|&(token, logprob)| (text(token), finite(logprob)))
                .collect()
        }));
    }
}

/// How many bytes of a text, whose rest is given, a token of an echoed prompt stands for. Those that a
/// tokenizer adds have no text, and neither has the space that some put in front of the first word.
fn num_bytes_in(rest: &[u8], tokenizer: &Tokenizer, token: TokenId) -> usize {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    let word = bytes.strip_prefix(b" ").unwrap_or(bytes);
    if let Some(own) = [bytes, word].into_iter().find(|own| rest.starts_with(own)) {
        return own.len();
    }
    if tokenizer.is_special(token) {
        return 0;
    }
    // The tokenizer has changed the text before it cut it. The changes keep most characters.
    let mut starts = (0..rest.len()).filter(|&at| is_start(rest[at]));
    starts.nth(num_chars(bytes)).unwrap_or(rest.len())
}

/// A character counts for the token in which it begins; a token may only hold the rest of one.
fn num_chars(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| is_start(byte)).count()
}

fn is_start(byte: u8) -> bool {
    byte & 0xC0 != 0x80
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

pub fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST_LOGPROB)
}
