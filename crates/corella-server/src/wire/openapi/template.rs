//! The JSON files of this folder. A text such as `<max_model_len>` in them stands for a value of the program: a limit
//! of the server, or a constant that requests are checked against.

use serde_json::{Map, Value, json};

use crate::config::serve_config::ServeConfig;
use crate::wire::field_limit::{
    BATCH_ENDPOINTS, F32_BOUND, MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS,
    MAX_CACHE_SALT_BYTES, MAX_FILE_LIFE_S, MAX_GUIDED_CHOICES, MAX_NUM_PROMPTS, MAX_STOP_BYTES,
    MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOOL_NAME_BYTES,
};

/// The values of the texts in angle brackets.
pub struct Blanks(Vec<(&'static str, Value)>);

impl Blanks {
    pub fn of(config: &ServeConfig) -> Self {
        let mut model_names: Vec<Value> = config
            .served_model_names
            .iter()
            .map(|name| json!(name))
            .collect();
        model_names.push(Value::Null);
        let mut blanks = vec![
            ("<version>", json!(env!("CARGO_PKG_VERSION"))),
            ("<license>", json!(env!("CARGO_PKG_LICENSE"))),
            ("<model_names>", Value::Array(model_names)),
            ("<batch_endpoints>", json!(BATCH_ENDPOINTS)),
            ("<f32_bound>", json!(F32_BOUND)),
        ];
        let poolings = match config.is_encoder {
            true => json!(["last", "mean", "cls", "max", null]),
            false => json!(["last", "mean", null]),
        };
        let prompts = config.sentence.prompts.keys().map(|name| json!(name));
        let prompts = prompts.chain([Value::Null]);
        blanks.extend([
            ("<poolings>", poolings),
            ("<prompt_names>", prompts.collect()),
        ]);
        let numbers = [
            ("<hidden_size>", config.vector_len() as u64),
            ("<max_logprobs>", config.max_logprobs.into()),
            ("<max_model_len>", config.max_model_len.into()),
            ("<max_num_choices>", config.max_num_choices.into()),
            ("<max_token_id>", config.vocab_size.saturating_sub(1) as u64),
            ("<max_allowed_token_ids>", MAX_ALLOWED_TOKEN_IDS as u64),
            ("<max_bad_word_bytes>", MAX_BAD_WORD_BYTES as u64),
            ("<max_bad_words>", MAX_BAD_WORDS as u64),
            ("<max_cache_salt_bytes>", MAX_CACHE_SALT_BYTES as u64),
            ("<max_file_life_s>", MAX_FILE_LIFE_S),
            ("<max_guided_choices>", MAX_GUIDED_CHOICES as u64),
            ("<max_num_prompts>", MAX_NUM_PROMPTS as u64),
            ("<max_stop_bytes>", MAX_STOP_BYTES as u64),
            ("<max_stop_strings>", MAX_STOP_STRINGS as u64),
            ("<max_stop_token_ids>", MAX_STOP_TOKEN_IDS as u64),
            ("<max_tool_name_bytes>", MAX_TOOL_NAME_BYTES as u64),
        ];
        blanks.extend(numbers.map(|(blank, number)| (blank, number.into())));
        Self(blanks)
    }

    /// Returns the value of a file.
    pub fn fill(&self, file: &str) -> Value {
        let mut value = serde_json::from_str(file).expect("a file of this folder is JSON");
        self.fill_value(&mut value);
        value
    }

    /// Joins the objects of several files.
    pub fn fill_all(&self, files: &[&str]) -> Map<String, Value> {
        let mut objects = Map::new();
        for file in files {
            if let Value::Object(object) = self.fill(file) {
                objects.extend(object);
            }
        }
        objects
    }

    fn fill_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some((_, known)) = self.0.iter().find(|(blank, _)| blank == text) {
                    *value = known.clone();
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.fill_value(item)),
            Value::Object(members) => members
                .values_mut()
                .for_each(|member| self.fill_value(member)),
            _ => {}
        }
    }
}
