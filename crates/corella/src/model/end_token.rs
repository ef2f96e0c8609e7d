//! The tokenizer's end token. It ends answers, as in Transformers and vLLM, in addition to the end tokens of the
//! model's configuration. In some folders, only the tokenizer's files name the token that ends a turn.

use corella_model::ModelConfig;
use corella_text::Tokenizer;
use serde_json::Value;

use crate::Error;
use crate::model::model_file::FileContent;

/// The files of a tokenizer's special tokens. The first one with an end token counts.
const FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// Adds the end token of a tokenizer whose files `file` reads.
pub(crate) fn add(
    config: &mut ModelConfig,
    tokenizer: &Tokenizer,
    file: impl Fn(&str) -> FileContent,
) -> Result<(), Error> {
    for name in FILES {
        let Some(bytes) = file(name)? else {
            continue;
        };
        let fields: Value = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Config(format!("{name}: {error}")))?;
        let named = &fields["eos_token"];
        if let Some(token) = named.as_str().or(named["content"].as_str()) {
            let id = tokenizer.token_to_id(token);
            let drawable = id.filter(|&id| (id as usize) < config.spec.vocab_size);
            if let Some(id) = drawable {
                config.end_tokens.add(id, name);
            }
            return Ok(());
        }
    }
    Ok(())
}

/// The tokens that end answers, each with the place that names it.
pub(crate) fn display(config: &ModelConfig, tokenizer: &Tokenizer) -> String {
    let shown = config.end_tokens.iter().map(|end| {
        let token = tokenizer.id_to_token(end.id);
        let token = token.unwrap_or_else(|| format!("token {}", end.id));
        format!("{token} ({})", end.named_by)
    });
    shown.collect::<Vec<_>>().join(", ")
}
