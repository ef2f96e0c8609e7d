//! Special tokens by name, from a checkpoint's files.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::error::TextError;

/// Special tokens, under their names in templates. An absent token is undefined and prints nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub unk_token: Option<String>,
    pub pad_token: Option<String>,
    /// All other special tokens, such as `image_token`.
    pub others: BTreeMap<String, String>,
}

impl SpecialTokens {
    /// Tokens by name, as Transformers reads them. special_tokens_map.json counts if the configuration is of an older
    /// version, without a table of added tokens.
    pub(crate) fn of_files(
        config: &Json,
        special_tokens_map_json: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        let map = match config["added_tokens_decoder"].is_null() {
            true => json_of(special_tokens_map_json, "special_tokens_map.json")?,
            false => Json::Null,
        };
        let mut tokens = BTreeMap::new();
        for file in [config, &map] {
            let members = file.as_object().into_iter().flatten();
            let named = members.filter(|(name, _)| name.ends_with("_token"));
            let extra = file["extra_special_tokens"].as_object();
            for (name, token) in named.chain(extra.into_iter().flatten()) {
                if let Some(token) = token_content(token) {
                    tokens.insert(name.clone(), token);
                }
            }
        }
        Ok(Self {
            bos_token: tokens.remove("bos_token"),
            eos_token: tokens.remove("eos_token"),
            unk_token: tokens.remove("unk_token"),
            pad_token: tokens.remove("pad_token"),
            others: tokens,
        })
    }
}

fn token_content(token: &Json) -> Option<String> {
    token
        .as_str()
        .or_else(|| token["content"].as_str())
        .map(str::to_owned)
}

/// The content of a JSON file, or `null` without the file.
pub(crate) fn json_of(content: Option<&[u8]>, file: &str) -> Result<Json, TextError> {
    let Some(content) = content else {
        return Ok(Json::Null);
    };
    serde_json::from_slice(content)
        .map_err(|error| TextError::TokenizerConfig(format!("{file}: {error}")))
}
