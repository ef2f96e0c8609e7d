//! Text to token ids and back, by a Hugging Face tokenizer.json.

use std::sync::Arc;

use crate::detokenizer::Detokenizer;
use crate::error::TextError;
use crate::piece::PieceTable;

/// A tokenizer; clones share one.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    model: tokenizers::Tokenizer,
    pieces: PieceTable,
}

impl Tokenizer {
    /// Reads tokenizer.json. Its truncation and padding are ignored: a prompt is never cut silently.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let mut model = tokenizers::Tokenizer::from_bytes(tokenizer_json)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        model
            .with_truncation(None)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        model.with_padding(None);
        let pieces = PieceTable::new(&model)?;
        Ok(Self {
            inner: Arc::new(Inner { model, pieces }),
        })
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .inner
            .model
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`. Ids without a token are skipped. Bytes that are not UTF-8 become
    /// U+FFFD as Python's `bytes.decode(errors="replace")` makes them.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        let mut detokenizer = Detokenizer::new(self.clone(), skip_special_tokens, &[]);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        detokenizer.finish_into(&mut text);
        Ok(text)
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.model.token_to_id(token)
    }

    /// The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.model.id_to_token(id)
    }

    /// The bytes that the token adds to a text, when it is not the text's first one.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.bytes(id)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    pub(crate) fn pieces(&self) -> &PieceTable {
        &self.inner.pieces
    }
}
