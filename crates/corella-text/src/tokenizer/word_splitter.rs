//! Splits a text, word by word, into the same words as the `tokenizers` crate. The vocabulary's model then splits words
//! into tokens.
//!
//! The crate splits a whole text before the first word is tokenised, and keeps hundreds of bytes for each byte of the
//! text. Here the caller may stop after any word.

use serde_json::Value;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizedString, Normalizer as _, SplitDelimiterBehavior};

use crate::tokenizer::added_token::{AddedTokens, Section};
use crate::tokenizer::byte_alphabet::char_of_byte;
use crate::tokenizer::normalizer::Normalizer;

pub(crate) struct WordSplitter {
    /// Added tokens that are matched in the original text.
    raw_tokens: AddedTokens,
    normalizer: Normalizer,
    /// Added tokens that are matched in the normalised text.
    normalized_tokens: AddedTokens,
    pre_tokenizers: Vec<PreTokenizer>,
}

enum PreTokenizer {
    /// Makes words of the matches of a pattern and of the text between them.
    Regex(Box<Split>),
    /// Replaces each space by another character, where a new word may begin.
    Metaspace {
        replacement: char,
        prepend: Prepend,
        split: bool,
    },
    /// Replaces each byte by its character in the byte alphabet.
    ByteLevel,
}

#[derive(Clone, Copy, PartialEq)]
enum Prepend {
    Never,
    /// A replacement character is added only before a section at the beginning of the text.
    First,
    Always,
}

/// A part of a text.
pub(crate) enum Part<'a> {
    Token(u32),
    /// A word, spelled as in the vocabulary.
    Word(&'a str),
}

/// The pattern that `ByteLevel` uses with `use_regex`.
const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl WordSplitter {
    /// `None` for a tokenizer with unknown ways to split texts.
    pub(crate) fn new(model: &tokenizers::Tokenizer) -> Option<Self> {
        let normalizer = serde_json::to_value(model.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(model.get_pre_tokenizer()).ok()?;
        let mut pre_tokenizers = Vec::new();
        append_pre_tokenizers(&pre_tokenizer, &mut pre_tokenizers)?;
        let (mut raw, mut normalized) = (Vec::new(), Vec::new());
        for (&id, token) in model.get_added_vocabulary().get_added_tokens_decoder() {
            if token.single_word || token.lstrip || token.rstrip {
                return None;
            }
            if token.normalized {
                let mut content = NormalizedString::from(token.content.as_str());
                if let Some(normalizer) = model.get_normalizer() {
                    normalizer.normalize(&mut content).ok()?;
                }
                normalized.push((content.get().to_owned(), id));
            } else {
                raw.push((token.content.clone(), id));
            }
        }
        Some(Self {
            raw_tokens: AddedTokens::new(raw),
            normalizer: Normalizer::new(&normalizer)?,
            normalized_tokens: AddedTokens::new(normalized),
            pre_tokenizers,
        })
    }

    /// Splits a text at the added tokens that are matched in its original form. The texts between them are tokenised
    /// separately.
    pub(crate) fn sections<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Section<'a>> {
        self.raw_tokens.sections(text)
    }

    /// Passes the parts of a section to `sink` in order, until it returns an error. `is_start` means that the section
    /// begins the caller's text.
    pub(crate) fn split<E>(
        &self,
        section: &str,
        mut is_start: bool,
        sink: &mut impl FnMut(Part) -> Result<(), E>,
    ) -> Result<(), E> {
        let text = self.normalizer.normalize(section);
        for section in self.normalized_tokens.sections(&text) {
            match section {
                Section::Token(id) => sink(Part::Token(id))?,
                Section::Text(text) => split_words(&self.pre_tokenizers, text, is_start, sink)?,
            }
            is_start = false;
        }
        Ok(())
    }
}

fn append_pre_tokenizers(json: &Value, pre_tokenizers: &mut Vec<PreTokenizer>) -> Option<()> {
    // A further pre-tokenizer would see characters in place of bytes.
    if matches!(pre_tokenizers.last(), Some(PreTokenizer::ByteLevel)) {
        return None;
    }
    match json["type"].as_str() {
        None if json.is_null() => {}
        Some("Sequence") => {
            for nested in json["pretokenizers"].as_array()? {
                append_pre_tokenizers(nested, pre_tokenizers)?;
            }
        }
        Some("Split") => {
            let behavior = json["behavior"].as_str()?;
            if behavior != "Isolated" || json["invert"] != false {
                return None;
            }
            let pattern = match (&json["pattern"]["Regex"], &json["pattern"]["String"]) {
                (Value::String(regex), _) => SplitPattern::Regex(regex.clone()),
                (_, Value::String(text)) => SplitPattern::String(text.clone()),
                _ => return None,
            };
            pre_tokenizers.push(regex(pattern)?);
        }
        Some("Metaspace") => pre_tokenizers.push(PreTokenizer::Metaspace {
            replacement: json["replacement"].as_str()?.chars().next()?,
            prepend: match json["prepend_scheme"].as_str()? {
                "never" => Prepend::Never,
                "first" => Prepend::First,
                "always" => Prepend::Always,
                _ => return None,
            },
            split: json["split"].as_bool()?,
        }),
        Some("ByteLevel") if json["add_prefix_space"] == false => {
            if json["use_regex"] != false {
                pre_tokenizers.push(regex(SplitPattern::Regex(GPT2_PATTERN.to_owned()))?);
            }
            pre_tokenizers.push(PreTokenizer::ByteLevel);
        }
        _ => return None,
    }
    Some(())
}

fn regex(pattern: SplitPattern) -> Option<PreTokenizer> {
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?;
    Some(PreTokenizer::Regex(Box::new(split)))
}

/// Splits a text by the given pre-tokenizers. `is_start` means that it begins the caller's text.
fn split_words<E>(
    pre_tokenizers: &[PreTokenizer],
    text: &str,
    is_start: bool,
    sink: &mut impl FnMut(Part) -> Result<(), E>,
) -> Result<(), E> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((pre_tokenizer, behind)) = pre_tokenizers.split_first() else {
        return sink(Part::Word(text));
    };
    match pre_tokenizer {
        PreTokenizer::Regex(split) => {
            let mut end = 0;
            for (start, match_end) in split.regex.find_iter(text) {
                split_words(behind, &text[end..start], is_start && end == 0, sink)?;
                split_words(
                    behind,
                    &text[start..match_end],
                    is_start && start == 0,
                    sink,
                )?;
                end = match_end;
            }
            split_words(behind, &text[end..], is_start && end == 0, sink)
        }
        PreTokenizer::Metaspace {
            replacement,
            prepend,
            split,
        } => {
            let mut encoded = [0; 4];
            let replacement: &str = replacement.encode_utf8(&mut encoded);
            let mut text = text.replace(' ', replacement);
            let wants_prefix = match prepend {
                Prepend::Never => false,
                Prepend::First => is_start,
                Prepend::Always => true,
            };
            if wants_prefix && !text.starts_with(replacement) {
                text.insert_str(0, replacement);
            }
            let mut start = 0;
            if *split {
                for (at, _) in text.match_indices(replacement) {
                    split_words(behind, &text[start..at], is_start && start == 0, sink)?;
                    start = at;
                }
            }
            split_words(behind, &text[start..], is_start && start == 0, sink)
        }
        PreTokenizer::ByteLevel => {
            let word: String = text.bytes().map(char_of_byte).collect();
            split_words(behind, &word, is_start, sink)
        }
    }
}
