//! Conversion of a GGUF file's vocabulary to the tokenizer.json and tokenizer_config.json of the
//! folder that it was converted from.

use std::collections::HashMap;

use corella_core::TokenId;
use serde_json::{Map, Value, json};

use super::GgufFile;
use super::metadata::Metadata;
use super::pre_tokenizer::PreTokenizer;
use super::special_token::{TOKENS, special_token, token_types};
use crate::CheckpointError;
use crate::json::sentence_piece::{AddedSpace, Division, Piece, SentencePiece, TokenType};
use crate::json::tokenizer_json::{added_token, post_processor};

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
            // A part may begin with a space but contains no other space.
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

    /// A SentencePiece tokenizer, whose pieces are merged by their scores.
    fn sentence_piece(&self) -> Result<Value, CheckpointError> {
        const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
        let adds_space = self.metadata.try_flag(ADD_SPACE)?.unwrap_or(true);
        let scores: Vec<_> = self.metadata.numbers(SCORES)?.collect();
        if scores.len() != self.tokens.len() {
            let why = format!("there are {} tokens", self.tokens.len());
            return Err(self.metadata.refuse(SCORES, &why));
        }
        let tokens = self.tokens.iter().zip(&self.types).zip(scores);
        let pieces = tokens.map(|((&text, &kind), score)| Piece { text, score, kind });
        let model = SentencePiece {
            pieces: pieces.collect(),
            division: Division::Merges,
            byte_fallback: self.types.contains(&TokenType::Byte),
            charsmap: &[],
            removes_spaces: false,
            added_space: match adds_space {
                true => AddedSpace::Section,
                false => AddedSpace::None,
            },
        };
        let post_processor = self.post_processor(true)?;
        let is_kept = |piece: &Piece<'_>| !is_filler(piece.text, piece.kind);
        Ok(model.tokenizer_json(self.added_tokens(), post_processor, is_kept))
    }

    fn vocab(&self) -> Value {
        let used = self.tokens.iter().zip(&self.types).zip(0..);
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
            Some(added_token(id, token, special))
        });
        added.collect()
    }

    /// The tokens that are added before and after a text, if the caller asks for special tokens.
    fn post_processor(&self, adds_bos: bool) -> Result<Value, CheckpointError> {
        let token = |name: &str, default: bool| {
            let key = format!("tokenizer.ggml.add_{name}_token");
            let said = self.metadata.try_flag(&key)?;
            let id = special_token(self.metadata, name, self.tokens.len())?;
            match id.filter(|_| said.unwrap_or(default)) {
                Some(id) => Ok(Some((self.tokens[id as usize], id))),
                None if said == Some(true) => {
                    Err(self.metadata.refuse(&key, "but there is no such token"))
                }
                None => Ok(None),
            }
        };
        Ok(post_processor(
            token("bos", adds_bos)?,
            token("eos", false)?,
        ))
    }
}

/// Whether converters added the token to fill an unused row of the embedding.
fn is_filler(token: &str, kind: TokenType) -> bool {
    kind == TokenType::Unused && token.starts_with("[PAD")
}
