//! Pre-tokenizers, which split text before merges apply. A GGUF file only names its pre-tokenizer, so the definitions
//! are here. `tests/gguf/make_pre_tokenizer.py` makes llama.cpp split texts with each pre-tokenizer, for comparison.

use serde_json::{Value, json};

use super::metadata::Metadata;
use crate::CheckpointError;

/// A pre-tokenizer and its family's settings.
pub struct PreTokenizer {
    names: &'static [&'static str],
    /// Each expression splits the pieces of the previous ones. Every match is a piece, and so is the text between
    /// matches.
    expressions: &'static [&'static str],
    /// Whether text is first normalised to composed characters (NFC).
    pub composes: bool,
    /// Whether a word that is a token stays whole, regardless of the merges.
    pub ignores_merges: bool,
    /// Whether a BOS token is added if the file does not say.
    pub adds_bos: bool,
}

const KEY: &str = "tokenizer.ggml.pre";

const fn known(
    names: &'static [&'static str],
    expressions: &'static [&'static str],
) -> PreTokenizer {
    PreTokenizer {
        names,
        expressions,
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    }
}

const KNOWN: &[PreTokenizer] = &[
    known(
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        &[THREE_DIGITS],
    )
    .ignoring_merges()
    .adding_bos(),
    known(&["glm4", "glm5"], &[THREE_DIGITS]).ignoring_merges(),
    known(&["smaug-bpe", "dbrx", "chatglm-bpe"], &[THREE_DIGITS]),
    known(&["qwen2"], &[ONE_DIGIT]).composing(),
    known(
        &[
            "deepseek-r1-qwen",
            "megrez",
            "kormo",
            "f2llmv2",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[ONE_DIGIT],
    ),
    known(&["qwen35"], &[WITH_MARKS]).composing(),
    known(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    known(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[r"\p{N}", GPT2],
    ),
    known(
        &["falcon"],
        &[r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"],
    ),
    known(
        &["default"],
        &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    ),
    known(&["tekken"], &[CASED]).ignoring_merges().adding_bos(),
    known(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[GPT4O],
    ),
    known(&["granite-embed-multi-97m"], &[GPT4O]).ignoring_merges(),
    known(
        &["deepseek-coder"],
        &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u{4e00}-\u{9fa5}\u{0800}-\u{4e00}\u{ac00}-\u{d7ff}]+",
            r"\p{N}",
        ],
    ),
    known(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", CHINESE_OR_JAPANESE, DEEPSEEK],
    ),
    known(
        &["spark2_5"],
        &[r"\p{N}{1,3}", CHINESE_OR_JAPANESE, SPARK, r"\p{N}"],
    ),
    known(&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM]),
    known(&["viking"], &[BLOOM, r"\p{N}"]),
    known(
        &["jais-2"],
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)",
            r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        )],
    ),
    known(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
    ),
    known(
        &["seed-coder"],
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
    ),
    known(
        &["ufakzeka"],
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
    ),
    known(&["laguna"], &[r"[^\n]+|\n+", ONE_DIGIT]),
    known(
        &["exaone-moe"],
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
    ),
    known(
        &["minicpm5"],
        &[
            r"\p{N}{1,3}",
            concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+",
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ],
    )
    .ignoring_merges(),
    known(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
];

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const THREE_DIGITS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const ONE_DIGIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const WITH_MARKS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const CASED: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// GPT-4o's expression, in which short forms such as `'ll` stay with the word before them.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const CHINESE_OR_JAPANESE: &str = r"[\u{4e00}-\u{9fa5}\u{3040}-\u{30ff}]+";
const DEEPSEEK: &str = concat!(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const SPARK: &str = concat!(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
);
const BLOOM: &str = r" ?[^(\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";

impl PreTokenizer {
    const fn composing(mut self) -> Self {
        self.composes = true;
        self
    }

    const fn ignoring_merges(mut self) -> Self {
        self.ignores_merges = true;
        self
    }

    const fn adding_bos(mut self) -> Self {
        self.adds_bos = true;
        self
    }

    /// The pre-tokenizer named in a file.
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

    /// The pre-tokenizer in the form of tokenizer.json.
    pub fn json(&self) -> Value {
        let split = |expression: &&str| {
            json!({
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": false,
            })
        };
        let byte_level = json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": false,
            "use_regex": false,
        });
        let splits = self.expressions.iter().map(split);
        let steps: Vec<_> = splits.chain([byte_level]).collect();
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
