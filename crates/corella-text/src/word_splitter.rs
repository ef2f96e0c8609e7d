//! Splits a text into the words that a vocabulary's model then splits into tokens, one after the
//! other, and into the same ones as the `tokenizers` crate.
//!
//! The crate splits a whole text before it looks at the first word, and keeps hundreds of bytes
//! for each byte of it. Here whoever reads the words may stop at any of them.

use serde_json::Value;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizedString, Normalizer as _, SplitDelimiterBehavior};

use crate::added_token::{AddedTokens, Section};
use crate::byte_alphabet::char_of_byte;
use crate::normalizer::Normalizer;

pub(crate) struct WordSplitter {
    /// Looked for in the text as it is.
    raw_tokens: AddedTokens,
    normalizer: Normalizer,
    /// Looked for in the normalised text.
    normalized_tokens: AddedTokens,
    stages: Vec<Stage>,
}

enum Stage {
    /// Matches, and what lies between them, are words.
    Regex(Box<Split>),
    /// Spaces are written as another character, and words may begin at each.
    Metaspace {
        replacement: char,
        prepend: Prepend,
        split: bool,
    },
    /// Each byte is written as a character.
    ByteLevel,
}

#[derive(Clone, Copy, PartialEq)]
enum Prepend {
    Never,
    /// To a section that begins the text.
    First,
    Always,
}

/// What a text is made of.
pub(crate) enum Part<'a> {
    Token(u32),
    /// As the vocabulary spells it.
    Word(&'a str),
}

/// The pattern of `ByteLevel` with `use_regex`.
const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl WordSplitter {
    /// `None` for a tokenizer that splits in ways not known here.
    pub(crate) fn new(model: &tokenizers::Tokenizer) -> Option<Self> {
        let normalizer = serde_json::to_value(model.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(model.get_pre_tokenizer()).ok()?;
        let mut stages = Vec::new();
        append_stages(&pre_tokenizer, &mut stages)?;
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
            stages,
        })
    }

    /// Hands out the parts of the text in order, until one is answered with an error.
    pub(crate) fn split<E>(
        &self,
        text: &str,
        sink: &mut impl FnMut(Part) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut is_start = true;
        for section in self.raw_tokens.sections(text) {
            match section {
                Section::Token(id) => sink(Part::Token(id))?,
                Section::Text(text) => {
                    let text = self.normalizer.normalize(text);
                    for section in self.normalized_tokens.sections(&text) {
                        match section {
                            Section::Token(id) => sink(Part::Token(id))?,
                            Section::Text(text) => {
                                split_stages(&self.stages, text, is_start, sink)?;
                            }
                        }
                        is_start = false;
                    }
                }
            }
            is_start = false;
        }
        Ok(())
    }
}

fn append_stages(json: &Value, stages: &mut Vec<Stage>) -> Option<()> {
    // Behind it a stage would see characters that stand for bytes.
    if matches!(stages.last(), Some(Stage::ByteLevel)) {
        return None;
    }
    match json["type"].as_str() {
        None if json.is_null() => {}
        Some("Sequence") => {
            for nested in json["pretokenizers"].as_array()? {
                append_stages(nested, stages)?;
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
            stages.push(regex(pattern)?);
        }
        Some("Metaspace") => stages.push(Stage::Metaspace {
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
                stages.push(regex(SplitPattern::Regex(GPT2_PATTERN.to_owned()))?);
            }
            stages.push(Stage::ByteLevel);
        }
        _ => return None,
    }
    Some(())
}

fn regex(pattern: SplitPattern) -> Option<Stage> {
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?;
    Some(Stage::Regex(Box::new(split)))
}

/// `is_start` says that the text begins where the caller's does.
fn split_stages<E>(
    stages: &[Stage],
    text: &str,
    is_start: bool,
    sink: &mut impl FnMut(Part) -> Result<(), E>,
) -> Result<(), E> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((stage, behind)) = stages.split_first() else {
        return sink(Part::Word(text));
    };
    match stage {
        Stage::Regex(split) => {
            let mut end = 0;
            for (start, match_end) in split.regex.find_iter(text) {
                split_stages(behind, &text[end..start], is_start && end == 0, sink)?;
                split_stages(
                    behind,
                    &text[start..match_end],
                    is_start && start == 0,
                    sink,
                )?;
                end = match_end;
            }
            split_stages(behind, &text[end..], is_start && end == 0, sink)
        }
        Stage::Metaspace {
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
                    split_stages(behind, &text[start..at], is_start && start == 0, sink)?;
                    start = at;
                }
            }
            split_stages(behind, &text[start..], is_start && start == 0, sink)
        }
        Stage::ByteLevel => {
            let word: String = text.bytes().map(char_of_byte).collect();
            split_stages(behind, &word, is_start, sink)
        }
    }
}
