//! Fill in the middle: prompts for the text between a prefix and a suffix, after "Efficient Training of
//! Language Models to Fill in the Middle" (Bavarian et al., 2022).

use crate::tokenizer::Tokenizer;

/// The special tokens with which a model was trained to fill in the middle. All families here get the prefix first,
/// then the suffix, and continue with the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillInMiddle {
    before_prefix: &'static str,
    before_suffix: &'static str,
    before_middle: &'static str,
    /// Further tokens that end a middle, where the vocabulary has them.
    ends: &'static [&'static str],
}

/// The tokens of each family, from the model cards.
const FAMILIES: [FillInMiddle; 4] = [
    // Qwen 2.5 Coder and Qwen 3, CodeGemma.
    FillInMiddle {
        before_prefix: "<|fim_prefix|>",
        before_suffix: "<|fim_suffix|>",
        before_middle: "<|fim_middle|>",
        ends: &[
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|file_separator|>",
            "<|endoftext|>",
        ],
    },
    // StarCoder, StarCoder 2, Granite Code.
    FillInMiddle {
        before_prefix: "<fim_prefix>",
        before_suffix: "<fim_suffix>",
        before_middle: "<fim_middle>",
        ends: &["<fim_pad>", "<file_sep>", "<|endoftext|>"],
    },
    // DeepSeek Coder and DeepSeek V3, in which the hole is between the two.
    FillInMiddle {
        before_prefix: "<｜fim▁begin｜>",
        before_suffix: "<｜fim▁hole｜>",
        before_middle: "<｜fim▁end｜>",
        ends: &[],
    },
    // GLM 4.
    FillInMiddle {
        before_prefix: "<|code_prefix|>",
        before_suffix: "<|code_suffix|>",
        before_middle: "<|code_middle|>",
        ends: &[],
    },
];

impl FillInMiddle {
    /// The tokens of the family whose special tokens are in the vocabulary, if any.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let has = |token| tokenizer.token_to_id(token).is_some();
        FAMILIES
            .into_iter()
            .find(|family| family.markers().into_iter().all(has))
    }

    /// The prompt that a model continues with the text between `prefix` and `suffix`.
    pub fn prompt(&self, prefix: &str, suffix: &str) -> String {
        let [before_prefix, before_suffix, before_middle] = self.markers();
        [before_prefix, prefix, before_suffix, suffix, before_middle].concat()
    }

    /// Parts of other files, each a name and a text, before the prompt. If the vocabulary has tokens for the files of a
    /// repository, these separate the parts, as in the training of Qwen 2.5 Coder and StarCoder 2. Otherwise lines
    /// separate them.
    pub fn other_files(&self, tokenizer: &Tokenizer, files: &[(&str, &str)]) -> String {
        const REPOSITORY: [&str; 3] = ["<|repo_name|>", "<repo_name>", "<reponame>"];
        const SEPARATORS: [&str; 3] = ["<|file_sep|>", "<|file_separator|>", "<file_sep>"];
        if files.is_empty() {
            return String::new();
        }
        let first_of = |names: [&'static str; 3]| {
            names
                .into_iter()
                .find(|name| tokenizer.token_to_id(name).is_some())
        };
        let mut text = String::new();
        if let Some(repository) = first_of(REPOSITORY) {
            text.extend([repository, "myproject\n"]);
        }
        let separator = first_of(SEPARATORS);
        for (name, content) in files {
            match separator {
                Some(separator) => text.extend([separator, name, "\n", content]),
                None => text.extend(["\n\n--- snippet ---\n\n", content]),
            }
        }
        if let Some(separator) = separator {
            text.extend([separator, "filename\n"]);
        }
        text
    }

    /// The tokens that end a middle, in addition to the model's end tokens: tokens that cannot be part of a middle.
    pub fn end_token_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let markers = self.markers();
        let ends = markers.iter().chain(self.ends);
        ends.filter_map(|token| tokenizer.token_to_id(token))
            .collect()
    }

    fn markers(&self) -> [&'static str; 3] {
        [self.before_prefix, self.before_suffix, self.before_middle]
    }
}
