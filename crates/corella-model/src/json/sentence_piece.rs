//! SentencePiece vocabularies, from a `tokenizer.model` or a GGUF file, and their conversion to a tokenizer.json that
//! gives the same tokens.

mod folder;
mod model_file;
mod protobuf;

pub use self::folder::{MODEL_FILE, folder_tokenizer};

use std::cmp::Reverse;
use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value, json};

/// The role of a token in a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    Normal,
    Unknown,
    /// A token that a user's text never contains.
    Control,
    /// A text that is one token in any context.
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    /// The type with the number that SentencePiece and GGUF use.
    pub fn from_number(number: i128) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// The division of a text into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// Characters are merged into pieces, the piece with the highest score first.
    Merges,
    /// The division with the highest sum of scores.
    BestSum,
}

/// A vocabulary, and the changes of a text before its division.
pub struct SentencePiece<'a> {
    pub pieces: Vec<Piece<'a>>,
    pub division: Division,
    /// Whether characters outside of the pieces become bytes.
    pub byte_fallback: bool,
    /// A table of replaced characters, in SentencePiece's compiled form.
    pub charsmap: &'a [u8],
    /// Whether spaces at both ends are removed, and runs of spaces become one.
    pub removes_spaces: bool,
    pub added_space: AddedSpace,
}

pub struct Piece<'a> {
    pub text: &'a str,
    pub score: f64,
    pub kind: TokenType,
}

/// The place of a space that is added so that a word at the beginning has the same pieces as within a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedSpace {
    None,
    /// Before the text.
    Text,
    /// Before the text and after each special token, as old versions of Transformers did.
    Section,
}

/// The replacement of a space within pieces.
const SPACE: &str = "▁";
/// The score of pieces that must never be chosen: a division with such a piece is worse than any division without.
const NEVER: f64 = -1000.0;

impl SentencePiece<'_> {
    /// Makes tokenizer.json. The vocabulary has the pieces for which `is_kept` is true.
    pub fn tokenizer_json(
        &self,
        added_tokens: Value,
        post_processor: Value,
        is_kept: impl Fn(&Piece<'_>) -> bool,
    ) -> Value {
        let mut normalizers = Vec::new();
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if !self.charsmap.is_empty() {
            let charsmap = BASE64.encode(self.charsmap);
            normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": charsmap}));
        }
        if self.removes_spaces {
            for (pattern, content) in [("^ +| +$", ""), (" {2,}", " ")] {
                let pattern = json!({"Regex": pattern});
                normalizers
                    .push(json!({"type": "Replace", "pattern": pattern, "content": content}));
            }
        }
        let mut pre_tokenizer = Value::Null;
        if self.added_space == AddedSpace::Section {
            normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
        }
        if self.added_space == AddedSpace::Text {
            pre_tokenizer = json!({
                "type": "Metaspace",
                "replacement": SPACE,
                "prepend_scheme": "first",
                "split": false,
            });
        } else {
            let pattern = json!({"String": " "});
            normalizers.push(json!({"type": "Replace", "pattern": pattern, "content": SPACE}));
        }
        if self.added_space != AddedSpace::None {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added_tokens,
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": match self.division {
                Division::Merges => self.merging_model(is_kept),
                Division::BestSum => self.summing_model(),
            },
        })
    }

    fn unknown(&self) -> Option<usize> {
        let mut pieces = self.pieces.iter();
        pieces.position(|piece| piece.kind == TokenType::Unknown)
    }

    fn merging_model(&self, is_kept: impl Fn(&Piece<'_>) -> bool) -> Value {
        let pieces = self.pieces.iter().enumerate();
        let vocab = pieces.filter(|(_, piece)| is_kept(piece));
        let vocab: Map<_, _> = vocab
            .map(|(id, piece)| (piece.text.to_owned(), id.into()))
            .collect();
        json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": self.unknown().map(|id| self.pieces[id].text),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": self.byte_fallback,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": self.merges(),
        })
    }

    fn summing_model(&self) -> Value {
        let vocab = self.pieces.iter().map(|piece| match piece.kind {
            TokenType::Normal | TokenType::UserDefined => json!([piece.text, piece.score]),
            _ => json!([piece.text, NEVER]),
        });
        json!({
            "type": "Unigram",
            "unk_id": self.unknown(),
            "vocab": vocab.collect::<Vec<_>>(),
            "byte_fallback": self.byte_fallback,
        })
    }

    /// Lists every pair of pieces whose concatenation is a piece, in the order of merging.
    fn merges(&self) -> Vec<[&str; 2]> {
        // The work for a piece grows with the square of its length, and no vocabulary has longer pieces.
        const MAX_PIECE_BYTES: usize = 512;
        let pieces = self.pieces.iter().enumerate();
        let ids: HashMap<_, _> = pieces.map(|(id, piece)| (piece.text, id)).collect();
        let mut merges = Vec::new();
        for piece in &self.pieces {
            if piece.kind != TokenType::Normal || piece.text.len() > MAX_PIECE_BYTES {
                continue;
            }
            for (at, _) in piece.text.char_indices().skip(1) {
                let (left, right) = piece.text.split_at(at);
                if ids.contains_key(left) && ids.contains_key(right) {
                    merges.push((piece.score, left, right));
                }
            }
        }
        // Equal scores have the order of Transformers' converter.
        merges.sort_by(|(a, a_left, a_right), (b, b_left, b_right)| {
            let num_chars = |text: &str| Reverse(text.chars().count());
            let by_length = (num_chars(a_left), num_chars(a_right))
                .cmp(&(num_chars(b_left), num_chars(b_right)));
            b.total_cmp(a).then(by_length)
        });
        let pairs = merges.into_iter().map(|(_, left, right)| [left, right]);
        pairs.collect()
    }
}
