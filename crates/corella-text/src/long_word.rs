//! Where a long word may be cut without a change to its tokens.
//!
//! Byte-pair encoding joins neighbours for as long as the result is in the vocabulary. Between two
//! characters that stand side by side in no token nothing is ever joined, so that what lies on
//! either side has the tokens that it has alone. Vocabularies of Llama's first kind, whose only
//! word is the whole text, can be cut before nearly every space.

use std::collections::HashSet;

use tokenizers::models::ModelWrapper;

pub(crate) struct CutPoints {
    /// Neighbours in some token.
    joined: HashSet<(char, char)>,
    /// Tokens by themselves. Others become bytes or unknown, which may be joined.
    characters: HashSet<char>,
}

/// Shorter words are not worth a cut. Longer than any token, because a model may look for a whole
/// word in the vocabulary.
const PIECE_BYTES: usize = 4096;

impl CutPoints {
    /// `None` where a model does not join neighbours only.
    pub(crate) fn new(model: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(bpe) = model.get_model() else {
            return None;
        };
        let joins_neighbours = bpe.dropout.is_none()
            && bpe.continuing_subword_prefix.is_none()
            && bpe.end_of_word_suffix.is_none();
        if !joins_neighbours {
            return None;
        }
        let vocab = model.get_vocab(false);
        if vocab.keys().any(|token| token.len() >= PIECE_BYTES) {
            return None;
        }
        let mut cut_points = Self {
            joined: HashSet::new(),
            characters: HashSet::new(),
        };
        for token in vocab.keys() {
            let following = token.chars().skip(1);
            cut_points.joined.extend(token.chars().zip(following));
            let mut characters = token.chars();
            if let (Some(only), None) = (characters.next(), characters.next()) {
                cut_points.characters.insert(only);
            }
        }
        Some(cut_points)
    }

    /// The word in pieces. The last is not a short one, which the vocabulary might hold whole.
    pub(crate) fn pieces<'a>(&self, word: &'a str) -> impl Iterator<Item = &'a str> {
        let mut rest = word;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (piece, behind) = rest.split_at(self.cut(rest).unwrap_or(rest.len()));
            rest = behind;
            Some(piece)
        })
    }

    fn cut(&self, word: &str) -> Option<usize> {
        let last = word.len().checked_sub(PIECE_BYTES)?;
        let places = word.char_indices().zip(word.chars().skip(1));
        places
            .map(|((at, before), after)| (at + before.len_utf8(), before, after))
            .skip_while(|&(at, ..)| at < PIECE_BYTES)
            .take_while(|&(at, ..)| at <= last)
            .find(|&(_, before, after)| {
                !self.joined.contains(&(before, after))
                    && self.characters.contains(&before)
                    && self.characters.contains(&after)
            })
            .map(|(at, ..)| at)
    }
}
