//! The largest size of the text of one token.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{NormalizedString, Normalizer as _};

use crate::tokenizer::byte_alphabet::char_of_byte;
use crate::tokenizer::normalizer::max_shrinkage;

/// The largest number of bytes of a text that can become one token. A text of more than n times this number has more
/// than n tokens. `None` if unlimited or unknown.
pub(crate) fn max_bytes_per_token(
    model: &tokenizers::Tokenizer,
    vocab: &HashMap<String, u32>,
) -> Option<usize> {
    let normalizer = serde_json::to_value(model.get_normalizer()).ok()?;
    let pre_tokenizer = serde_json::to_value(model.get_pre_tokenizer()).ok()?;
    let shrinkage = max_shrinkage(&normalizer)?;
    if !keeps_text(&pre_tokenizer) {
        return None;
    }
    let ModelWrapper::BPE(bpe) = model.get_model() else {
        return None;
    };
    let is_byte_level = has_type(&normalizer, "ByteLevel") || has_type(&pre_tokenizer, "ByteLevel");
    let has_all_bytes = (0..=u8::MAX).all(|byte| match is_byte_level {
        true => vocab.contains_key(char_of_byte(byte).encode_utf8(&mut [0; 4]) as &str),
        false => bpe.byte_fallback && vocab.contains_key(&format!("<0x{byte:02X}>")),
    });
    // Otherwise characters outside of the vocabulary might be dropped, or many such characters might become one token.
    let counts_unknown = bpe.unk_token.is_some() && !bpe.fuse_unk;
    if !has_all_bytes && !counts_unknown {
        return None;
    }
    let num_bytes = |token: &String| match is_byte_level {
        true => token.chars().count(),
        false => token.len(),
    };
    let longest = vocab.keys().map(num_bytes).max()?;
    // An unknown token represents one character.
    let mut max_bytes = longest.max(char::MAX.len_utf8()) * shrinkage;
    for token in model
        .get_added_vocabulary()
        .get_added_tokens_decoder()
        .values()
    {
        // A token with `lstrip` or `rstrip` includes any number of spaces beside it.
        if token.lstrip || token.rstrip {
            return None;
        }
        let mut content = NormalizedString::from(token.content.as_str());
        if token.normalized
            && let Some(normalizer) = model.get_normalizer()
        {
            normalizer.normalize(&mut content).ok()?;
        }
        let longest = token.content.len().max(content.get().len() * shrinkage);
        max_bytes = max_bytes.max(longest);
    }
    Some(max_bytes)
}

/// Whether every byte of a text becomes part of some word.
fn keeps_text(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("Sequence") => pre_tokenizer["pretokenizers"]
            .as_array()
            .is_some_and(|nested| nested.iter().all(keeps_text)),
        Some("Split" | "Punctuation") => pre_tokenizer["behavior"] != "Removed",
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some(_) => false,
    }
}

pub(crate) fn has_type(json: &Value, kind: &str) -> bool {
    let nested = ["normalizers", "pretokenizers"];
    let nested = nested.iter().filter_map(|field| json[*field].as_array());
    json["type"] == kind || nested.flatten().any(|json| has_type(json, kind))
}
