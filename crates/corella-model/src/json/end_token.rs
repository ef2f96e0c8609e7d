//! The tokens that end an answer, and the places that say so.

use corella_core::TokenId;

/// A token that ends an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndToken {
    pub id: TokenId,
    /// The file, or the key of a GGUF file, that is the first to name the token.
    pub named_by: String,
}

/// Every token that ends an answer, in the order of the places that name them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens(Vec<EndToken>);

impl EndTokens {
    /// Adds a token, unless another place has named it.
    pub fn add(&mut self, id: TokenId, named_by: &str) {
        if self.0.iter().all(|token| token.id != id) {
            self.0.push(EndToken {
                id,
                named_by: named_by.to_owned(),
            });
        }
    }

    pub(crate) fn remove(&mut self, id: TokenId) {
        self.0.retain(|token| token.id != id);
    }

    pub fn ids(&self) -> Vec<TokenId> {
        self.0.iter().map(|token| token.id).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &EndToken> {
        self.0.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
