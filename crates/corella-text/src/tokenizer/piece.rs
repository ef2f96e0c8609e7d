//! The bytes that each token adds to a text, computed once when the tokenizer is read.
//!
//! The `tokenizers` crate decodes a list of tokens at once, and a token's text may depend on its neighbours (`▁` at the
//! start, byte tokens, halves of a character). To decode again for each new token takes O(n), or a guess of the needed
//! context. But the decoder of every generating model gives each token bytes that depend only on the token and on
//! whether it is the first one, and reads the joined bytes as UTF-8 at the end. Those bytes are kept here. Other
//! decoders are refused when the file is read.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::Value;

use crate::error::TextError;
use crate::tokenizer::byte_alphabet::byte_of_char;

pub(crate) struct PieceTable {
    bytes: Vec<u8>,
    /// The ends of the pieces: `bytes[ends[id - 1]..ends[id]]` is the piece of `id`.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    decoder: PieceDecoder,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Absent,
    Normal,
    Special,
}

impl PieceTable {
    pub(crate) fn new(
        model: &tokenizers::Tokenizer,
        vocab: &HashMap<String, u32>,
    ) -> Result<Self, TextError> {
        let decoder = match model.get_decoder() {
            None => PieceDecoder {
                steps: vec![Step::Join],
                strip_start: None,
            },
            Some(decoder) => {
                let json = serde_json::to_value(decoder)
                    .map_err(|error| TextError::TokenizerDecoder(error.to_string()))?;
                PieceDecoder::new(&json)?
            }
        };

        let added = model.get_added_vocabulary();
        let added_tokens = added.get_added_tokens_decoder();
        let len = vocab
            .values()
            .chain(added_tokens.keys())
            .max()
            .map_or(0, |&largest| largest as usize + 1);
        // A small file with a large token id must not lead to an allocation of gigabytes.
        if len > 16 * (vocab.len() + added_tokens.len()) + 65_536 {
            return Err(TextError::TokenizerFile(format!(
                "the largest token id, {}, is far beyond the {} tokens",
                len - 1,
                vocab.len() + added_tokens.len()
            )));
        }
        let mut tokens: Vec<Option<&str>> = vec![None; len];
        for (token, &id) in vocab {
            tokens[id as usize] = Some(token);
        }
        for (&id, token) in added_tokens {
            tokens[id as usize] = Some(&token.content);
        }

        let mut table = Self {
            bytes: Vec::with_capacity(len * 8),
            ends: Vec::with_capacity(len),
            kinds: Vec::with_capacity(len),
            decoder,
        };
        for token in tokens {
            let kind = match token {
                None => Kind::Absent,
                Some(token) => {
                    table.decoder.append(token, false, &mut table.bytes);
                    if added.is_special_token(token) {
                        Kind::Special
                    } else {
                        Kind::Normal
                    }
                }
            };
            let end = u32::try_from(table.bytes.len())
                .map_err(|_| TextError::TokenizerFile("more than 4 GiB of tokens".into()))?;
            table.ends.push(end);
            table.kinds.push(kind);
        }
        Ok(table)
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        if *self.kinds.get(id)? == Kind::Absent {
            return None;
        }
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start as usize..self.ends[id] as usize])
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Special)
    }

    pub(crate) fn decoder(&self) -> &PieceDecoder {
        &self.decoder
    }
}

/// The decoder of tokenizer.json, applied to one token at a time.
pub(crate) struct PieceDecoder {
    steps: Vec<Step>,
    /// A character that is removed from the start of the whole text, and the largest number of removals.
    strip_start: Option<(char, usize)>,
}

enum Step {
    /// Joins tokens by spaces, as for a tokenizer without a decoder.
    Join,
    ByteLevel,
    Metaspace {
        replacement: char,
        bare_start: bool,
    },
    Replace {
        pattern: String,
        content: String,
    },
    ByteFallback,
    /// Joins tokens by spaces, unless they continue a word (BERT).
    WordPiece {
        prefix: String,
        /// Whether spaces before punctuation are removed.
        cleanup: bool,
    },
}

/// The replacements of WordPiece's cleanup, in this order.
const CLEANUP: [(&str, &str); 11] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

impl PieceDecoder {
    fn new(json: &Value) -> Result<Self, TextError> {
        let nested;
        let decoders = match json["type"].as_str() {
            Some("Sequence") => json["decoders"].as_array().map_or(&[][..], Vec::as_slice),
            _ => {
                nested = [json.clone()];
                &nested[..]
            }
        };
        let mut decoder = Self {
            steps: Vec::new(),
            strip_start: None,
        };
        // After the tokens have been fused into one text, no decoder sees single tokens.
        let mut fused = false;
        for json in decoders {
            let kind = json["type"].as_str().unwrap_or("without a type");
            match kind {
                "ByteLevel" if decoder.steps.is_empty() && !fused => {
                    decoder.steps.push(Step::ByteLevel);
                    fused = true;
                }
                "Metaspace" if !decoder.has_byte_step() && !fused => {
                    decoder.steps.push(Step::Metaspace {
                        replacement: char_of(&json["replacement"])?,
                        bare_start: json["prepend_scheme"].as_str() != Some("never"),
                    });
                }
                "Replace" if !decoder.has_byte_step() && !fused => {
                    let Some(pattern) = json["pattern"]["String"].as_str() else {
                        return Err(unsupported("Replace with a regular expression"));
                    };
                    decoder.steps.push(Step::Replace {
                        pattern: pattern.to_owned(),
                        content: json["content"].as_str().unwrap_or_default().to_owned(),
                    });
                }
                "ByteFallback" if !decoder.has_byte_step() && !fused => {
                    decoder.steps.push(Step::ByteFallback);
                }
                "WordPiece" if decoder.steps.is_empty() && !fused => {
                    decoder.steps.push(Step::WordPiece {
                        prefix: json["prefix"].as_str().unwrap_or("##").to_owned(),
                        cleanup: json["cleanup"].as_bool().unwrap_or(true),
                    });
                }
                "Fuse" => fused = true,
                "Strip" if fused && decoder.strip_start.is_none() && json["stop"] == 0 => {
                    let start = json["start"].as_u64().unwrap_or(0) as usize;
                    decoder.strip_start = Some((char_of(&json["content"])?, start));
                }
                kind => return Err(unsupported(kind)),
            }
        }
        Ok(decoder)
    }

    fn has_byte_step(&self) -> bool {
        self.steps
            .iter()
            .any(|step| matches!(step, Step::ByteLevel | Step::ByteFallback))
    }

    pub(crate) fn strip_start(&self) -> Option<(char, usize)> {
        self.strip_start
    }

    /// Whether a token may have another text in the first position.
    pub(crate) fn minds_first(&self) -> bool {
        self.steps.iter().any(|step| {
            matches!(
                step,
                Step::Join
                    | Step::WordPiece { .. }
                    | Step::Metaspace {
                        bare_start: true,
                        ..
                    }
            )
        })
    }

    pub(crate) fn append(&self, token: &str, is_first: bool, out: &mut Vec<u8>) {
        let mut text = Cow::Borrowed(token);
        for step in &self.steps {
            match step {
                Step::Join if is_first => {}
                Step::Join => text = Cow::Owned(format!(" {text}")),
                Step::ByteLevel => return append_byte_level(&text, out),
                Step::Metaspace {
                    replacement,
                    bare_start,
                } => {
                    let with = if *bare_start && is_first { "" } else { " " };
                    if text.contains(*replacement) {
                        text = Cow::Owned(text.replace(*replacement, with));
                    }
                }
                Step::Replace { pattern, content } => {
                    if text.contains(pattern.as_str()) {
                        text = Cow::Owned(text.replace(pattern, content));
                    }
                }
                Step::WordPiece { prefix, cleanup } => {
                    if !is_first {
                        text = match text.strip_prefix(prefix.as_str()) {
                            Some(rest) => Cow::Owned(rest.to_owned()),
                            None => Cow::Owned(format!(" {text}")),
                        };
                    }
                    for (from, to) in CLEANUP.iter().filter(|_| *cleanup) {
                        if text.contains(from) {
                            text = Cow::Owned(text.replace(from, to));
                        }
                    }
                }
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return out.push(byte);
                    }
                }
            }
        }
        out.extend_from_slice(text.as_bytes());
    }
}

fn unsupported(kind: &str) -> TextError {
    TextError::TokenizerDecoder(format!("{kind} is not supported in this place"))
}

fn char_of(json: &Value) -> Result<char, TextError> {
    let mut chars = json.as_str().unwrap_or_default().chars();
    match (chars.next(), chars.next()) {
        (Some(only), None) => Ok(only),
        _ => Err(TextError::TokenizerDecoder(format!(
            "{json} is not one character"
        ))),
    }
}

/// Reads a byte token: `<0x0A>` is the byte 10.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Appends the bytes of the characters, or the token itself if it has any other character.
fn append_byte_level(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match byte_of_char(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}
