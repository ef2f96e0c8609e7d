//! Log-probabilities in the formats of `/v1/completions` and `/v1/chat/completions`.

use std::collections::BTreeMap;

use corella_core::{Logprobs, TokenId};
use corella_text::Tokenizer;
use serde::Serialize;
use serde_json::Value;

use crate::text::scored_prompt::ScoredPrompt;

/// Stands for −∞, which JSON lacks, as in vLLM.
const LEAST_LOGPROB: f32 = -9999.0;

/// The form of tokens in an answer.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether tokens are written as ids like `token_id:7`, because different tokens may have equal texts.
    pub as_ids: bool,
}

impl TokenNames<'_> {
    fn name(self, token: TokenId) -> String {
        match self.as_ids {
            true => format!("token_id:{token}"),
            false => text_of(self.tokenizer.token_bytes(token).unwrap_or_default()),
        }
    }
}

/// `choices[].logprobs` of `/v1/completions`, which has a column for each kind of value.
#[derive(Default, Serialize)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    /// `None` for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// The tokens' ranks among all tokens, if tokens are named by their ids.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ranks: Vec<Option<u32>>,
}

impl CompletionLogprobs {
    /// `text_offset` is the position, in characters, of the first of these tokens. The function advances it past the
    /// last.
    pub fn push_output(
        &mut self,
        names: TokenNames,
        tokens: &[(TokenId, Box<Logprobs>)],
        text_offset: &mut usize,
    ) {
        for (token, logprobs) in tokens {
            self.push(names, *token, Some((&**logprobs, usize::MAX)), *text_offset);
            let bytes = names.tokenizer.token_bytes(*token).unwrap_or_default();
            *text_offset += num_chars(bytes);
        }
    }

    /// Adds the tokens of an echoed prompt, which is the beginning of `text`, with `num_top` alternatives to each
    /// token.
    pub fn push_prompt(
        &mut self,
        names: TokenNames,
        prompt: &ScoredPrompt,
        num_top: usize,
        text: &str,
        text_offset: &mut usize,
    ) {
        let mut rest = text.as_bytes();
        let others = prompt.others.iter();
        let others = others.map(|scored| (scored.token, Some((&scored.logprobs, num_top))));
        for (token, logprobs) in [(prompt.first, None)].into_iter().chain(others) {
            self.push(names, token, logprobs, *text_offset);
            let (own, behind) = rest.split_at(num_bytes_in(rest, names.tokenizer, token));
            *text_offset += num_chars(own);
            rest = behind;
        }
    }

    fn push(
        &mut self,
        names: TokenNames,
        token: TokenId,
        logprobs: Option<(&Logprobs, usize)>,
        text_offset: usize,
    ) {
        self.text_offset.push(text_offset);
        self.tokens.push(names.name(token));
        let logprob = logprobs.map(|(logprobs, _)| finite(logprobs.token));
        self.token_logprobs.push(logprob);
        if names.as_ids {
            let rank = logprobs.and_then(|(logprobs, _)| known(logprobs.rank));
            self.ranks.push(rank);
        }
        self.top_logprobs.push(logprobs.map(|(logprobs, num_top)| {
            let top = logprobs.top.iter().take(num_top);
            let own = (token, logprobs.token);
            top.chain([&own])
                .map(|&(token, logprob)| (names.name(token), finite(logprob)))
                .collect()
        }));
    }
}

/// Returns the number of bytes that a token of an echoed prompt takes from the rest of the text. A token that the
/// tokenizer adds takes none, and neither does the space that some tokenizers put before the first word.
fn num_bytes_in(rest: &[u8], tokenizer: &Tokenizer, token: TokenId) -> usize {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    let word = bytes.strip_prefix(b" ").unwrap_or(bytes);
    if let Some(own) = [bytes, word].into_iter().find(|own| rest.starts_with(own)) {
        return own.len();
    }
    if tokenizer.is_special(token) {
        return 0;
    }
    // The tokenizer has changed the text before cutting it. Most changes keep the number of characters.
    let mut starts = (0..rest.len()).filter(|&at| is_start(rest[at]));
    starts.nth(num_chars(bytes)).unwrap_or(rest.len())
}

/// Counts the characters that begin in `bytes`: a character in several tokens counts for the first of them.
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
    /// The token's rank among all tokens, if tokens are named by their ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub fn new(names: TokenNames, tokens: &[(TokenId, Box<Logprobs>)]) -> Self {
        let row = |(token, logprobs): &(TokenId, Box<Logprobs>)| ChatLogprob {
            token: TokenLogprob::new(names, *token, logprobs.token),
            rank: known(logprobs.rank).filter(|_| names.as_ids),
            top_logprobs: logprobs
                .top
                .iter()
                .map(|&(token, logprob)| TokenLogprob::new(names, token, logprob))
                .collect(),
        };
        Self {
            content: tokens.iter().map(row).collect(),
        }
    }
}

impl ChatLogprobs {
    /// The rows as JSON.
    pub fn into_rows(self) -> Vec<Value> {
        // Rows are structs of strings and numbers, whose encoding cannot fail.
        self.content
            .iter()
            .filter_map(|row| serde_json::to_value(row).ok())
            .collect()
    }
}

impl TokenLogprob {
    fn new(names: TokenNames, token: TokenId, logprob: f32) -> Self {
        let bytes = names.tokenizer.token_bytes(token).unwrap_or_default();
        Self {
            token: names.name(token),
            logprob: finite(logprob),
            bytes: bytes.to_vec(),
        }
    }
}

fn known(rank: u32) -> Option<u32> {
    (rank > 0).then_some(rank)
}

pub fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST_LOGPROB)
}
