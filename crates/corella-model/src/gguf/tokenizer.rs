//! Conversion of a GGUF file's vocabulary to the tokenizer.json and tokenizer_config.json of the
//! folder that it was converted from.

use std::cmp::Reverse;
use std::collections::HashMap;

use corella_core::TokenId;
use serde_json::{Map, Value, json};

use super::GgufFile;
use super::metadata::Metadata;
use super::pre_tokenizer::PreTokenizer;
use super::special_token::{TOKENS, TokenType, special_token, token_types};
use crate::CheckpointError;

const MODEL: &str = "tokenizer.ggml.model";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
/// The original tokenizer.json, which some files contain.
const WHOLE: &str = "tokenizer.huggingface.json";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// The content of tokenizer.json.
pub fn tokenizer_json(file: &GgufFile) -> Result<Vec<u8>, CheckpointError> {
    let metadata = &file.metadata;
    if let Some(whole) = metadata.try_text(WHOLE)? {
        return Ok(whole.as_bytes().to_vec());
    }
    let vocabulary = Vocabulary::read(file)?;
    let tokenizer = match metadata.text(MODEL)? {
        "gpt2" => vocabulary.byte_level()?,
        "llama" => vocabulary.sentence_piece()?,
        _ => return Err(metadata.refuse(MODEL, "supported are gpt2, llama")),
    };
    Ok(tokenizer.to_string().into_bytes())
}

/// The content of tokenizer_config.json.
pub fn tokenizer_config_json(file: &GgufFile) -> Result<Vec<u8>, CheckpointError> {
    let metadata = &file.metadata;
    let tokens = metadata.texts(TOKENS)?;
    let mut config = Map::new();
    for (field, name) in [
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ] {
        let id = match special_token(metadata, name, tokens.len()) {
            // Converters write -1 or other invalid ids for these tokens, which matter only to
            // templates that print them.
            Err(_) if matches!(name, "unknown" | "padding") => None,
            id => id?,
        };
        config.insert(field.into(), id.map(|id| tokens[id as usize]).into());
    }
    config.insert("chat_template".into(), chat_template(metadata)?);
    Ok(Value::Object(config).to_string().into_bytes())
}

/// The chat template, or a list of templates with names.
fn chat_template(metadata: &Metadata) -> Result<Value, CheckpointError> {
    let Some(default) = metadata.try_text(CHAT_TEMPLATE)? else {
        return Ok(Value::Null);
    };
    let names = metadata.texts("tokenizer.chat_templates")?;
    if names.is_empty() {
        return Ok(default.into());
    }
    let mut templates = vec![json!({"name": "default", "template": default})];
    for name in names.into_iter().filter(|name| *name != "default") {
        let template = metadata.text(&format!("{CHAT_TEMPLATE}.{name}"))?;
        templates.push(json!({"name": name, "template": template}));
    }
    Ok(templates.into())
}

struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Vec<&'a str>,
    types: Vec<TokenType>,
    ids: HashMap<&'a str, TokenId>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, CheckpointError> {
        let metadata = &file.metadata;
        if !metadata.has(TOKENS) {
            return Err(metadata.missing(TOKENS));
        }
        let tokens = metadata.texts(TOKENS)?;
        let num_rows = file.shape("token_embd.weight").map_or(0, |shape| shape[0]);
        if tokens.len() > num_rows {
            let why = format!("token_embd.weight has only {num_rows} rows");
            return Err(metadata.refuse(TOKENS, &why));
        }
        let types = token_types(metadata, tokens.len())?;
        let ids = (0..).zip(&tokens).map(|(id, &token)| (token, id)).collect();
        Ok(Self {
            metadata,
            tokens,
            types,
            ids,
        })
    }

    /// A byte-level BPE tokenizer: bytes become printable characters, which are merged pair by pair
    /// within words.
    fn byte_level(&self) -> Result<Value, CheckpointError> {
        let pre_tokenizer = PreTokenizer::of(self.metadata)?;
        let mut merges = Vec::new();
        for (index, merge) in self.metadata.texts(MERGES)?.into_iter().enumerate() {
            // A part may begin with a space but contains no other.
            let space = merge.char_indices().skip(1).find(|(_, c)| *c == ' ');
            let parts = space.map(|(at, _)| (&merge[..at], &merge[at + 1..]));
            let known = parts.filter(|(left, right)| {
                let all = [*left, *right, &format!("{left}{right}")];
                all.iter().all(|part| self.ids.contains_key(part))
            });
            let Some((left, right)) = known else {
                let why = format!("[{index}], {merge:?}, does not merge two tokens into one");
                return Err(self.metadata.refuse(MERGES, &why));
            };
            merges.push(json!([left, right]));
        }
        let normalizer = match pre_tokenizer.composes {
            true => json!({"type": "NFC"}),
            false => Value::Null,
        };
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer.json(),
            "post_processor": self.post_processor(pre_tokenizer.adds_bos)?,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": true,
                "trim_offsets": true,
                "use_regex": true,
            },
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": pre_tokenizer.ignores_merges,
                "vocab": self.vocab(),
                "merges": merges,
            },
        }))
    }

    /// A SentencePiece tokenizer: characters, spaces among them, are merged wherever the result is
    /// a token, that with the highest score first. Characters that are no tokens become bytes.
    fn sentence_piece(&self) -> Result<Value, CheckpointError> {
        const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
        let adds_space = self.metadata.try_flag(ADD_SPACE)?.unwrap_or(true);
        let unknown = (self.types.iter()).position(|kind| *kind == TokenType::Unknown);
        let mut normalizers = Vec::new();
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if adds_space {
            normalizers.push(json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}));
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": self.post_processor(true)?,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown.map(|id| self.tokens[id]),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": self.types.contains(&TokenType::Byte),
                "ignore_merges": false,
                "vocab": self.vocab(),
                "merges": self.merges_by_score()?,
            },
        }))
    }

    /// Lists every pair of tokens whose concatenation is a token, in the order of merging.
    fn merges_by_score(&self) -> Result<Vec<[&'a str; 2]>, CheckpointError> {
        // Longer tokens would cost their length squared, and no vocabulary has any.
        const MAX_TOKEN_BYTES: usize = 512;
        let scores: Vec<_> = self.metadata.numbers(SCORES)?.collect();
        if scores.len() != self.tokens.len() {
            let why = format!("there are {} tokens", self.tokens.len());
            return Err(self.metadata.refuse(SCORES, &why));
        }
        let mut merges = Vec::new();
        for ((&token, kind), score) in self.tokens.iter().zip(&self.types).zip(scores) {
            if *kind != TokenType::Normal || token.len() > MAX_TOKEN_BYTES {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if self.ids.contains_key(left) && self.ids.contains_key(right) {
                    merges.push((score, left, right));
                }
            }
        }
        // Equal scores are ordered as Transformers' converter does.
        merges.sort_by(|(a, a_left, a_right), (b, b_left, b_right)| {
            let num_chars = |text: &str| Reverse(text.chars().count());
            let by_length = (num_chars(a_left), num_chars(a_right))
                .cmp(&(num_chars(b_left), num_chars(b_right)));
            b.total_cmp(a).then(by_length)
        });
        let pairs = merges.into_iter().map(|(_, left, right)| [left, right]);
        Ok(pairs.collect())
    }

    fn vocab(&self) -> Value {
        let used = self.tokens.iter().zip(&self.types).zip(0..);
        // Converters fill the embedding rows that have no token in this way.
        let is_filler = |token: &str, kind| kind == TokenType::Unused && token.starts_with("[PAD");
        let used = used.filter(|((token, kind), _)| !is_filler(token, **kind));
        let entries = used.map(|((token, _), id): (_, TokenId)| ((*token).to_owned(), id.into()));
        Value::Object(entries.collect())
    }

    fn added_tokens(&self) -> Value {
        let tokens = self.tokens.iter().zip(&self.types).zip(0..);
        let added = tokens.filter_map(|((token, kind), id): (_, TokenId)| {
            let special = match kind {
                TokenType::Control | TokenType::Unknown => true,
                TokenType::UserDefined => false,
                _ => return None,
            };
            Some(json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            }))
        });
        added.collect()
    }

    /// Describes which tokens are added before and after a text, if the caller asks for special
    /// tokens.
    fn post_processor(&self, adds_bos: bool) -> Result<Value, CheckpointError> {
        let mut special_tokens = Map::new();
        let mut piece = |name: &str, default: bool| {
            let key = format!("tokenizer.ggml.add_{name}_token");
            let said = self.metadata.try_flag(&key)?;
            let id = special_token(self.metadata, name, self.tokens.len())?;
            let Some(id) = id.filter(|_| said.unwrap_or(default)) else {
                return match said {
                    Some(true) => Err(self.metadata.refuse(&key, "but there is no such token")),
                    _ => Ok(None),
                };
            };
            let token = self.tokens[id as usize];
            let entry = json!({"id": token, "ids": [id], "tokens": [token]});
            special_tokens.insert(token.to_owned(), entry);
            Ok(Some(json!({"SpecialToken": {"id": token, "type_id": 0}})))
        };
        let bos = piece("bos", adds_bos)?;
        let eos = piece("eos", false)?;
        if bos.is_none() && eos.is_none() {
            return Ok(Value::Null);
        }
        let around = |sequence: &str| {
            let text = json!({"Sequence": {"id": sequence, "type_id": 0}});
            let pieces = [bos.clone(), Some(text), eos.clone()];
            pieces.into_iter().flatten().collect::<Vec<_>>()
        };
        let pair = [around("A"), around("B")].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": pair,
            "special_tokens": special_tokens,
        }))
    }
}
