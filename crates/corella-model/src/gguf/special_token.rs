//! The special tokens of a GGUF file, which begin and end a sequence.

use corella_core::TokenId;

use super::metadata::Metadata;
use crate::CheckpointError;
use crate::sentence_piece::TokenType;

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

/// Tokens with which makers of models end an answer, perhaps unmarked by converters.
const ENDS: [&str; 12] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
];

/// Every token that ends an answer. Tokens marked in the file come first.
pub fn end_token_ids(metadata: &Metadata) -> Result<Vec<TokenId>, CheckpointError> {
    let tokens = metadata.texts(TOKENS)?;
    let types = token_types(metadata, tokens.len())?;
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(special_token(metadata, name, tokens.len())?);
    }
    for (id, (token, token_type)) in tokens.iter().zip(&types).enumerate() {
        if matches!(token_type, TokenType::Control | TokenType::UserDefined) && ENDS.contains(token)
        {
            ids.push(id as TokenId);
        }
    }
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

/// The token of `tokenizer.ggml.{name}_token_id`.
pub fn special_token(
    metadata: &Metadata,
    name: &str,
    num_tokens: usize,
) -> Result<Option<TokenId>, CheckpointError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.try_token_id(&key)? {
        Some(id) if id as usize >= num_tokens => {
            Err(metadata.refuse(&key, &format!("there are {num_tokens} tokens")))
        }
        id => Ok(id),
    }
}
