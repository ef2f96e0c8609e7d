//! Finds positions where a long word may be cut without changing its tokens.
//!
//! Byte-pair encoding joins neighbours while the result is in the vocabulary. If no token has two given characters side
//! by side, they are never joined. So a text may be cut between them, and its two parts have the same tokens as the
//! whole. SentencePiece vocabularies like Llama 2's, for which a whole text is one word, can be cut before nearly every
//! space.

use std::collections::HashSet;

use tokenizers::models::ModelWrapper;

pub(crate) struct CutPoints {
    /// Pairs of characters that are neighbours in some token.
    joined: HashSet<(char, char)>,
    /// The characters that are tokens by themselves. Other characters become byte tokens or unknown tokens, which may
    /// be joined.
    characters: HashSet<char>,
}

/// The least length of a piece. It must exceed the length of any token, because a model may look
/// for a whole word in the vocabulary.
const PIECE_BYTES: usize = 4096;

impl CutPoints {
    /// `None` if the model does more than joining neighbours.
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

    /// Cuts the word into pieces. The last one is never short, because the vocabulary might hold a
    /// short piece as a whole.
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
