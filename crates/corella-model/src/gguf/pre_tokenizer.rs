//! Pre-tokenizers, which split text before merges apply. A GGUF file only names its pre-tokenizer,
//! so they are defined here.

use serde_json::{Value, json};

use super::metadata::Metadata;
use crate::CheckpointError;

/// A pre-tokenizer and its family's settings.
pub struct PreTokenizer {
    names: &'static [&'static str],
    split: Split,
    /// Whether text is first normalised to composed characters (NFC).
    pub composes: bool,
    /// Whether a word that is a token stays whole, whatever the merges.
    pub ignores_merges: bool,
    /// Whether a BOS token is added if the file does not say.
    pub adds_bos: bool,
}

enum Split {
    /// Splits by each expression in turn. Every match is a piece, and so is the text between
    /// matches.
    Expressions(&'static [&'static str]),
    /// Splits as GPT-2 does.
    Gpt2,
    /// Separates all digits, and then splits as GPT-2 does.
    DigitsThenGpt2,
}

const KEY: &str = "tokenizer.ggml.pre";

const KNOWN: [PreTokenizer; 8] = [
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        split: Split::Expressions(&[THREE_DIGITS]),
        composes: false,
        ignores_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["smaug-bpe", "dbrx"],
        split: Split::Expressions(&[THREE_DIGITS]),
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["qwen2"],
        split: Split::Expressions(&[ONE_DIGIT]),
        composes: true,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["deepseek-r1-qwen", "megrez"],
        split: Split::Expressions(&[ONE_DIGIT]),
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["gpt-2"],
        split: Split::Gpt2,
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r"],
        split: Split::DigitsThenGpt2,
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["tekken"],
        split: Split::Expressions(&[CASED]),
        composes: false,
        ignores_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        split: Split::Expressions(&[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u{4e00}-\u{9fa5}\u{0800}-\u{4e00}\u{ac00}-\u{d7ff}]+",
            r"\p{N}",
        ]),
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
];

const THREE_DIGITS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const ONE_DIGIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const CASED: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

impl PreTokenizer {
    /// The pre-tokenizer that a file names.
    pub fn of(metadata: &Metadata) -> Result<&'static Self, CheckpointError> {
        let found = match metadata.try_text(KEY)? {
            Some(name) => KNOWN.iter().find(|known| known.names.contains(&name)),
            None => None,
        };
        found.ok_or_else(|| {
            let known = KNOWN.iter().flat_map(|known| known.names);
            let known: Vec<_> = known.copied().collect();
            metadata.refuse(KEY, &format!("supported are {}", known.join(", ")))
        })
    }

    /// The pre-tokenizer as tokenizer.json describes it.
    pub fn json(&self) -> Value {
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel",
                "add_prefix_space": false,
                "trim_offsets": false,
                "use_regex": use_regex,
            })
        };
        let steps = match self.split {
            Split::Gpt2 => vec![byte_level(true)],
            Split::DigitsThenGpt2 => vec![
                json!({"type": "Digits", "individual_digits": true}),
                byte_level(true),
            ],
            Split::Expressions(expressions) => {
                let split = |expression: &&str| {
                    json!({
                        "type": "Split",
                        "pattern": {"Regex": expression},
                        "behavior": "Isolated",
                        "invert": false,
                    })
                };
                let splits = expressions.iter().map(split);
                splits.chain([byte_level(false)]).collect()
            }
        };
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
