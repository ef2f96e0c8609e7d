//! The special tokens of a GGUF file, which begin and end a sequence.

use corella_core::TokenId;

use super::metadata::Metadata;
use crate::json::sentence_piece::TokenType;
use crate::{CheckpointError, EndTokens};

pub const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";

/// The types of all tokens.
pub fn token_types(
    metadata: &Metadata,
    num_tokens: usize,
) -> Result<Vec<TokenType>, CheckpointError> {
    if !metadata.has(TOKEN_TYPES) {
        return Ok(vec![TokenType::Normal; num_tokens]);
    }
    let types = metadata.integers(TOKEN_TYPES)?.map(TokenType::from_number);
    let types: Vec<_> = types.collect();
    if types.len() != num_tokens {
        let why = format!("{TOKENS} has {num_tokens} elements");
        return Err(metadata.refuse(TOKEN_TYPES, &why));
    }
    Ok(types)
}

/// Tokens that end an answer in published models. Not every converter marks them.
const ENDS: [&str; 17] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    MESSAGE_END,
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
];
/// The end of an answer, except in gpt-oss's format. There this token ends a message, of which an answer may have
/// several, and the answer ends with one of `HARMONY_ENDS`.
const MESSAGE_END: &str = "<|end|>";
const HARMONY_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];

/// Every token that ends an answer. Tokens marked in the file come first.
pub fn end_tokens(metadata: &Metadata) -> Result<EndTokens, CheckpointError> {
    let tokens = metadata.texts(TOKENS)?;
    let types = token_types(metadata, tokens.len())?;
    let mut ends = EndTokens::default();
    for name in ["eos", "eot", "eom"] {
        if let Some(id) = special_token(metadata, name, tokens.len())? {
            ends.add(id, &key_of(name));
        }
    }
    for (id, (token, token_type)) in tokens.iter().zip(&types).enumerate() {
        if matches!(token_type, TokenType::Control | TokenType::UserDefined) && ENDS.contains(token)
        {
            ends.add(id as TokenId, "its text");
        }
    }
    if HARMONY_ENDS.iter().all(|end| tokens.contains(end))
        && let Some(id) = tokens.iter().position(|token| *token == MESSAGE_END)
    {
        ends.remove(id as TokenId);
    }
    Ok(ends)
}

fn key_of(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

/// The token of `tokenizer.ggml.{name}_token_id`.
pub fn special_token(
    metadata: &Metadata,
    name: &str,
    num_tokens: usize,
) -> Result<Option<TokenId>, CheckpointError> {
    let key = key_of(name);
    match metadata.try_token_id(&key)? {
        Some(id) if id as usize >= num_tokens => {
            Err(metadata.refuse(&key, &format!("there are {num_tokens} tokens")))
        }
        id => Ok(id),
    }
}
