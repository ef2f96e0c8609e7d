//! Sampling defaults: their source, and the values that replace them.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use corella_model::{GenerationDefaults, ModelConfig};
use serde_json::{Map, Value};

use crate::Error;
use crate::input::option_file;

/// The source of sampling defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationChoice {
    pub source: GenerationSource,
    /// Replaces values of the source.
    pub overrides: GenerationDefaults,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationSource {
    /// The model's `generation_config.json`.
    #[default]
    Model,
    /// The defaults of the API.
    Neutral,
    /// `generation_config.json` in this folder.
    Folder(PathBuf),
}

impl FromStr for GenerationSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Model,
            "vllm" => Self::Neutral,
            folder => Self::Folder(folder.into()),
        })
    }
}

impl GenerationChoice {
    pub fn apply(&self, config: &mut ModelConfig) -> Result<(), Error> {
        match &self.source {
            GenerationSource::Model => {}
            GenerationSource::Neutral => config.generation = GenerationDefaults::default(),
            GenerationSource::Folder(folder) => {
                let file = folder.join("generation_config.json");
                let shown = file.display().to_string();
                let bytes = option_file::read(&file).map_err(|error| {
                    Error::Io(format!("--generation-config cannot read {shown}"), error)
                })?;
                config.set_generation_config(&shown, &bytes)?;
            }
        }
        let overrides = self.overrides.clone();
        let defaults = &mut config.generation;
        defaults.temperature = overrides.temperature.or(defaults.temperature);
        defaults.top_k = overrides.top_k.or(defaults.top_k);
        defaults.top_p = overrides.top_p.or(defaults.top_p);
        defaults.min_p = overrides.min_p.or(defaults.min_p);
        let penalty = overrides.repetition_penalty;
        defaults.repetition_penalty = penalty.or(defaults.repetition_penalty);
        defaults.stop = overrides.stop;
        Ok(())
    }
}

/// Parses the values of `--override-generation-config`.
pub fn overrides(fields: &Map<String, Value>) -> Result<GenerationDefaults, Error> {
    let mut defaults = GenerationDefaults::default();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let refuse = |range: &str| {
            let option = "--override-generation-config";
            Error::Config(format!("{option}: {name} must be {range}, not {value}"))
        };
        let within = |range: &str, is_valid: fn(f64) -> bool| {
            let number = value.as_f64().filter(|number| is_valid(*number));
            number
                .map(|number| number as f32)
                .ok_or_else(|| refuse(range))
        };
        match name.as_str() {
            "temperature" => {
                defaults.temperature = Some(within("at least 0", |x| x >= 0.0)?);
            }
            "top_p" => {
                let valid = |x| x > 0.0 && x <= 1.0;
                defaults.top_p = Some(within("above 0 and at most 1", valid)?);
            }
            "min_p" => {
                defaults.min_p = Some(within("from 0 to 1", |x| (0.0..=1.0).contains(&x))?);
            }
            "repetition_penalty" => {
                defaults.repetition_penalty = Some(within("above 0", |x| x > 0.0)?);
            }
            // -1 and 0 draw from all tokens.
            "top_k" => {
                let number = value.as_i64().filter(|number| *number >= -1);
                let number = number.and_then(|number| u32::try_from(number.max(0)).ok());
                defaults.top_k = Some(number.ok_or_else(|| refuse("a whole number from -1"))?);
            }
            "stop" => {
                let texts = stop_strings(value);
                defaults.stop = texts.ok_or_else(|| refuse("a text or a list of texts"))?;
            }
            _ => {
                return Err(Error::Config(format!(
                    "--override-generation-config: there is no `{name}`; it takes temperature, top_k, \
                     top_p, min_p, repetition_penalty and stop"
                )));
            }
        }
    }
    Ok(defaults)
}

/// Returns one or several texts, and `None` for other values and empty texts.
fn stop_strings(value: &Value) -> Option<Vec<String>> {
    let texts = match value {
        Value::Array(texts) => texts.as_slice(),
        text => std::slice::from_ref(text),
    };
    let text = |value: &Value| {
        let text = value.as_str().filter(|text| !text.is_empty());
        text.map(str::to_owned)
    };
    texts.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: Value) -> Result<GenerationDefaults, String> {
        let fields = value.as_object().expect("the test gives an object").clone();
        overrides(&fields).map_err(|error| error.to_string())
    }

    #[test]
    fn values_outside_their_range_are_refused() {
        let all = json!({
            "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.5, "repetition_penalty": null, "stop": ["a", "b"]
        });
        let expected = GenerationDefaults {
            temperature: Some(0.0),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(0.5),
            repetition_penalty: None,
            stop: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(of(all), Ok(expected));
        let one = of(json!({"stop": "END"})).map(|defaults| defaults.stop);
        assert_eq!(one, Ok(vec!["END".to_owned()]));
        for (value, word) in [
            (
                json!({"temperature": -1}),
                "temperature must be at least 0, not -1",
            ),
            (json!({"temperature": "hot"}), "temperature must be"),
            (json!({"top_p": 0}), "top_p must be above 0"),
            (json!({"top_k": 1.5}), "top_k must be a whole number"),
            (json!({"min_p": 2}), "min_p must be from 0 to 1"),
            (
                json!({"repetition_penalty": 0}),
                "repetition_penalty must be above 0",
            ),
            (json!({"stop": ["a", 1]}), "stop must be a text or a list"),
            (json!({"stop": ""}), "stop must be a text or a list"),
            (json!({"max_new_tokens": 5}), "there is no `max_new_tokens`"),
        ] {
            let error = of(value.clone()).unwrap_err();
            assert!(error.contains(word), "{value}: {error}");
        }
    }
}
