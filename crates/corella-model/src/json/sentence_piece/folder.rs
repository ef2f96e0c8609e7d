//! The tokenizer of a folder with a `tokenizer.model` and without a tokenizer.json.

use std::collections::BTreeMap;

use corella_core::TokenId;
use serde_json::{Map, Value, json};

use super::model_file::ModelFile;
use super::{AddedSpace, TokenType};
use crate::CheckpointError;
use crate::json::json_object::{self, JsonObject};
use crate::json::tokenizer_json::{added_token, post_processor};

pub const MODEL_FILE: &str = "tokenizer.model";
const CONFIG_FILE: &str = "tokenizer_config.json";
const ADDED_FILE: &str = "added_tokens.json";

/// Makes tokenizer.json from a `tokenizer.model` with its name, and from the content of tokenizer_config.json and
/// added_tokens.json.
pub fn folder_tokenizer(
    (label, bytes): (String, &[u8]),
    config: Option<&[u8]>,
    added: Option<&[u8]>,
) -> Result<Value, CheckpointError> {
    let mut file =
        ModelFile::parse(bytes).map_err(|problem| CheckpointError::new(label, problem))?;
    let parse = |label, bytes| match bytes {
        Some(bytes) => json_object::parse(label, bytes),
        None => Ok(Map::new()),
    };
    let (config, added) = (parse(CONFIG_FILE, config)?, parse(ADDED_FILE, added)?);
    let config = Config(JsonObject::new(CONFIG_FILE, &config));
    let added = config.added_tokens(&added)?;

    // If the configuration and the model have different texts for a token, the configuration takes precedence.
    let pieces = &mut file.vocabulary.pieces;
    for (&id, token) in &added {
        if let Some(piece) = pieces.get_mut(id as usize) {
            piece.text = &token.content;
        }
    }
    check_ids(pieces.len(), &added)?;
    let id_of = |text: &str| {
        let mut pieces = file.vocabulary.pieces.iter();
        let of_piece = pieces.position(|piece| piece.text == text);
        let of_added = || added.iter().find(|(_, token)| token.content == text);
        of_piece.or_else(|| of_added().map(|(&id, _)| id as usize))
    };
    let special = |name: &str, id: Option<usize>| {
        let text = match config.token(name) {
            Some(text) => text,
            None => file.vocabulary.pieces.get(id?)?.text.to_owned(),
        };
        let id = id_of(&text)?;
        Some((text, id as TokenId))
    };
    // Transformers adds a BOS token by default, and an EOS token only on request.
    let (adds_bos, adds_eos) = (
        config.flag("add_bos_token", true)?,
        config.flag("add_eos_token", false)?,
    );
    let bos = special("bos_token", file.bos_id).filter(|_| adds_bos);
    let eos = special("eos_token", file.eos_id).filter(|_| adds_eos);
    let post_processor = post_processor(borrowed(&bos), borrowed(&eos));

    let mut tokens: BTreeMap<TokenId, Value> = BTreeMap::new();
    for (piece, id) in file.vocabulary.pieces.iter().zip(0..) {
        let special = match piece.kind {
            TokenType::Control | TokenType::Unknown => true,
            TokenType::UserDefined => false,
            _ => continue,
        };
        tokens.insert(id, added_token(id, piece.text, special));
    }
    for (&id, token) in &added {
        tokens.insert(id, token.json(id));
    }
    let adds_space = config.flag("add_prefix_space", true)?;
    if file.vocabulary.added_space != AddedSpace::None {
        file.vocabulary.added_space = match (adds_space, config.flag("legacy", true)?) {
            (false, _) => AddedSpace::None,
            (true, true) => AddedSpace::Section,
            (true, false) => AddedSpace::Text,
        };
    }
    let added_tokens = tokens.into_values().collect();
    Ok(file
        .vocabulary
        .tokenizer_json(added_tokens, post_processor, |_| true))
}

/// Refuses added tokens if their ids do not follow the model's pieces without a gap.
fn check_ids(
    num_pieces: usize,
    added: &BTreeMap<TokenId, AddedToken>,
) -> Result<(), CheckpointError> {
    let beyond = added.range(num_pieces as TokenId..);
    let mut beyond = (num_pieces..).zip(beyond);
    let Some((next_id, (id, token))) = beyond.find(|(next, (id, _))| **id as usize != *next) else {
        return Ok(());
    };
    let problem = format!(
        "added token {:?} has id {id}, and there is none with id {next_id}",
        token.content
    );
    Err(CheckpointError::new(CONFIG_FILE, problem))
}

fn borrowed(token: &Option<(String, TokenId)>) -> Option<(&str, TokenId)> {
    let (text, id) = token.as_ref()?;
    Some((text, *id))
}

/// The content of tokenizer_config.json.
struct Config<'a>(JsonObject<'a>);

/// A token that configuration files add to the vocabulary or describe.
struct AddedToken {
    content: String,
    /// The token's other members in its file.
    fields: Map<String, Value>,
}

impl Config<'_> {
    fn flag(&self, field: &str, default: bool) -> Result<bool, CheckpointError> {
        match self.0.get(field) {
            Some(_) => self.0.flag(field),
            None => Ok(default),
        }
    }

    /// A special token, which is a text or an object with its `content`.
    fn token(&self, field: &str) -> Option<String> {
        let value = self.0.get(field)?;
        let text = value.as_str().or_else(|| value["content"].as_str());
        text.map(str::to_owned)
    }

    /// The tokens of added_tokens.json and of `added_tokens_decoder`, which has more fields for each token.
    fn added_tokens(
        &self,
        added: &Map<String, Value>,
    ) -> Result<BTreeMap<TokenId, AddedToken>, CheckpointError> {
        let mut tokens = BTreeMap::new();
        for (content, id) in added {
            let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
            let Some(id) = id else {
                let problem = format!("the id of {content:?} is not a token id");
                return Err(CheckpointError::new(ADDED_FILE, problem));
            };
            let token = AddedToken {
                content: content.clone(),
                fields: Map::new(),
            };
            tokens.insert(id, token);
        }
        const DECODER: &str = "added_tokens_decoder";
        let Some(decoder) = self.0.get(DECODER).and_then(Value::as_object) else {
            return Ok(tokens);
        };
        for (id, fields) in decoder {
            let content = fields["content"].as_str();
            let (Ok(id), Some(content)) = (id.parse(), content) else {
                let why = "must be an object of tokens with their content, by their ids";
                return Err(self.0.refuse(DECODER, why));
            };
            let token = AddedToken {
                content: content.to_owned(),
                fields: fields.as_object().cloned().unwrap_or_default(),
            };
            tokens.insert(id, token);
        }
        Ok(tokens)
    }
}

impl AddedToken {
    fn json(&self, id: TokenId) -> Value {
        let mut token = added_token(id, &self.content, true);
        for field in ["single_word", "lstrip", "rstrip", "normalized", "special"] {
            if let Some(value) = self.fields.get(field).filter(|value| value.is_boolean()) {
                token[field] = json!(value);
            }
        }
        token
    }
}
