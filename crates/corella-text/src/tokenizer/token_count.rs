//! Counts the tokens of a tokenizer.json without building the tokenizer, because building takes much longer.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::TextError;

/// The number of ids of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount {
    /// One more than the largest id of the vocabulary without added tokens.
    pub num_vocabulary_ids: usize,
    /// One more than the largest id of all tokens.
    pub num_ids: usize,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: usize,
}

#[derive(Deserialize)]
struct Model {
    vocab: NumIds,
}

/// One more than the largest id of a vocabulary.
struct NumIds(usize);

impl TokenCount {
    /// Reads tokenizer.json.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let file: File = serde_json::from_slice(tokenizer_json)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        let added = file.added_tokens.iter().map(|token| token.id);
        let vocabulary = file.model.vocab.0;
        // A token may be both in the vocabulary and added.
        let num_added = added.map(|id| id.saturating_add(1)).max();
        Ok(Self {
            num_vocabulary_ids: vocabulary,
            num_ids: vocabulary.max(num_added.unwrap_or(0)),
        })
    }
}

impl<'de> Deserialize<'de> for NumIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = NumIds;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tokens with their ids, or a list of tokens")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NumIds, A::Error> {
        let mut num_ids = 0;
        while let Some((_, id)) = map.next_entry::<IgnoredAny, usize>()? {
            num_ids = num_ids.max(id.saturating_add(1));
        }
        Ok(NumIds(num_ids))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<NumIds, A::Error> {
        let mut num_ids = 0;
        while list.next_element::<IgnoredAny>()?.is_some() {
            num_ids += 1;
        }
        Ok(NumIds(num_ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(json: &str) -> (usize, usize) {
        let count = TokenCount::from_bytes(json.as_bytes()).unwrap();
        (count.num_vocabulary_ids, count.num_ids)
    }

    #[test]
    fn ids_of_every_kind_of_vocabulary_are_counted() {
        let added = r#"[{"id": 9, "content": "<x>"}, {"id": 0, "content": "a"}]"#;
        let map = r#"{"type": "BPE", "vocab": {"a": 0, "b": 7, "c": 2}, "merges": []}"#;
        let list = r#"{"type": "Unigram", "vocab": [["a", -1.5], ["b", 0]]}"#;
        assert_eq!(count(&format!(r#"{{"model": {map}}}"#)), (8, 8));
        assert_eq!(
            count(&format!(r#"{{"added_tokens": {added}, "model": {map}}}"#)),
            (8, 10)
        );
        assert_eq!(count(&format!(r#"{{"model": {list}}}"#)), (2, 2));
        assert!(TokenCount::from_bytes(b"{}").is_err());
        assert!(TokenCount::from_bytes(br#"{"model": {"vocab": {"a": -1}}}"#).is_err());
    }
}
