//! Values with another form in other servers than in Corella's options: lists and objects in JSON, and numbers with
//! another unit.

use serde::Deserialize;
use serde_json::{Map, Value};

/// The form of a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueForm {
    /// Texts in a JSON array, as in vLLM.
    JsonList,
    /// Texts separated by commas, as in llama-server.
    CommaList,
    /// A number of GiB, as in vLLM. 0 asks for nothing.
    Gibibytes,
    /// vLLM's JSON object about speculation.
    SpeculativeConfig,
}

/// A value converted to options of Corella.
#[derive(Debug, PartialEq)]
pub struct OwnOptions {
    /// One word for each option, such as `--draft-tokens=4`.
    pub words: Vec<String>,
    /// Members that change nothing.
    pub ignored: Vec<String>,
}

impl ValueForm {
    /// Returns the book's text about the form.
    #[cfg(test)]
    pub fn note(self) -> &'static str {
        match self {
            Self::JsonList => "each text of the JSON list is an origin",
            Self::CommaList => "commas separate origins",
            Self::Gibibytes => "a number of GiB",
            Self::SpeculativeConfig => {
                "of the JSON object, `method`, `model` and `num_speculative_tokens` become `--speculate`, \
                 `--draft-model` and `--draft-tokens`; methods but `ngram`, `draft_model` and `mtp` are refused"
            }
        }
    }

    /// Returns the value as options. vLLM's `--flag.member` sets one member of an object. The error says why the value
    /// is refused.
    pub fn options(
        self,
        option: &str,
        member: Option<&str>,
        value: &str,
    ) -> Result<OwnOptions, String> {
        let repeated = |texts: Vec<String>| OwnOptions {
            words: { texts.iter() }
                .map(|text| format!("{option}={text}"))
                .collect(),
            ignored: Vec::new(),
        };
        match (self, member) {
            (Self::JsonList, _) => match serde_json::from_str(value) {
                Ok(texts) => Ok(repeated(texts)),
                // A single text needs no brackets here.
                Err(_) if !value.trim_start().starts_with('[') => {
                    Ok(repeated(vec![value.to_owned()]))
                }
                Err(_) => Err("the value must be a list of texts in JSON".to_owned()),
            },
            (Self::CommaList, _) => {
                let texts = value.split(',').map(|text| text.trim().to_owned());
                Ok(repeated(texts.filter(|text| !text.is_empty()).collect()))
            }
            (Self::Gibibytes, _) => match value.parse::<f64>() {
                Ok(number) if number >= 0.0 && number.is_finite() => {
                    let num_bytes = (number * f64::from(1 << 30)) as u64;
                    let size = (num_bytes > 0).then(|| num_bytes.to_string());
                    Ok(repeated(size.into_iter().collect()))
                }
                _ => Err("the value must be a number of GiB".to_owned()),
            },
            (Self::SpeculativeConfig, None) => match serde_json::from_str(value) {
                Ok(config) => speculative_config(&config, false),
                Err(_) => Err(
                    "the value must be an object in JSON, such as {\"method\": \"ngram\", \
                     \"num_speculative_tokens\": 4}"
                        .to_owned(),
                ),
            },
            (Self::SpeculativeConfig, Some(member)) => {
                let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
                let config = Map::from_iter([(member.replace('-', "_"), value)]);
                speculative_config(&config, true)
            }
        }
    }
}

/// Members that adjust how vLLM runs a draft model or looks up n-grams.
const WITHOUT_EFFECT: [&str; 14] = [
    "attention_backend",
    "code_revision",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "max_model_len",
    "moe_backend",
    "parallel_drafting",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
    "tensor_parallel_size",
    "use_local_argmax_reduction",
];

/// Converts vLLM's `--speculative-config`. With `is_part`, `config` has only the member of one
/// `--speculative-config.member` flag; further flags may set the other members.
fn speculative_config(config: &Map<String, Value>, is_part: bool) -> Result<OwnOptions, String> {
    let mut own = OwnOptions {
        words: Vec::new(),
        ignored: Vec::new(),
    };
    let members = config.iter().filter(|(_, value)| !value.is_null());
    let (mut method, mut model, mut num_tokens) = (None, None, None);
    for (name, value) in members {
        match (name.as_str(), value) {
            ("method", Value::String(text)) => method = Some(text.as_str()),
            ("model", Value::String(text)) => model = Some(text.as_str()),
            ("num_speculative_tokens", Value::Number(number)) => num_tokens = Some(number),
            ("method" | "model", _) => return Err(format!("{name} must be a text")),
            ("num_speculative_tokens", _) => return Err(format!("{name} must be a number")),
            (name, _) if WITHOUT_EFFECT.contains(&name) => own.ignored.push(name.to_owned()),
            (name, _) => return Err(format!("Corella has nothing like {name}; leave it out")),
        }
    }
    // Older versions name the method instead of a model.
    if let Some(name) = model.filter(|name| matches!(*name, "ngram" | "[ngram]")) {
        method = method.or(Some(name.trim_matches(['[', ']'])));
        model = None;
    }
    match (method, model) {
        (Some("ngram" | "ngram_gpu"), _) => own.words.push("--speculate=ngram".to_owned()),
        // Older versions name the family first. The head always belongs to the served model.
        (Some("mtp" | "qwen3_next_mtp" | "qwen3_5_mtp"), _) => {
            own.words.push("--speculate=mtp".to_owned());
            own.ignored.extend(model.map(|_| "model".to_owned()));
        }
        (Some("draft_model"), None) if !is_part => {
            return Err("draft_model needs a model".to_owned());
        }
        (Some("draft_model"), _) | (None, Some(_)) => {
            own.words.push("--speculate=draft".to_owned());
            own.words
                .extend(model.map(|model| format!("--draft-model={model}")));
        }
        (Some(method), _) => return Err(missing_method(method)),
        (None, None) if is_part => {}
        (None, None) => {
            return Err(
                "it needs a method: \"ngram\", \"mtp\", or \"draft_model\" with a model".to_owned(),
            );
        }
    }
    own.words
        .extend(num_tokens.map(|number| format!("--draft-tokens={number}")));
    Ok(own)
}

/// Returns why a method of vLLM is refused.
fn missing_method(method: &str) -> String {
    let has_heads = ["eagle", "medusa", "mlp_speculator", "mtp", "dflash"];
    let why = match method {
        "suffix" => "; ngram guesses from the prompt and the answer too",
        method if has_heads.iter().any(|head| method.contains(head)) => {
            ", because such heads are not read; use \"mtp\" with Qwen3-Next and Qwen3.5, \"ngram\", or \
             \"draft_model\" with a smaller model"
        }
        _ => "; use \"ngram\", or \"draft_model\" with a smaller model",
    };
    format!("the method {method} is not there{why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speculation(value: &str) -> Result<String, String> {
        let options = ValueForm::SpeculativeConfig.options("--speculate", None, value);
        options.map(|own| own.words.join(" "))
    }

    #[test]
    fn a_speculative_config_is_three_options() {
        for (value, expected) in [
            (
                r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}"#,
                "--speculate=ngram --draft-tokens=4",
            ),
            (
                r#"{"model": "[ngram]", "num_speculative_tokens": 5}"#,
                "--speculate=ngram --draft-tokens=5",
            ),
            (
                r#"{"model": "owner/small", "num_speculative_tokens": 3}"#,
                "--speculate=draft --draft-model=owner/small --draft-tokens=3",
            ),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2}"#,
                "--speculate=mtp --draft-tokens=2",
            ),
            (
                r#"{"method": "qwen3_next_mtp", "model": "owner/served"}"#,
                "--speculate=mtp",
            ),
            (
                r#"{"method": "draft_model", "model": "folder", "revision": null}"#,
                "--speculate=draft --draft-model=folder",
            ),
        ] {
            assert_eq!(speculation(value).as_deref(), Ok(expected), "{value}");
        }
        let form = ValueForm::SpeculativeConfig;
        let value = r#"{"method": "ngram", "prompt_lookup_max": 4}"#;
        let own = form.options("--speculate", None, value).unwrap();
        assert_eq!(own.ignored, ["prompt_lookup_max"]);
        let member = |name, value| form.options("--speculate", Some(name), value);
        let words = member("num_speculative_tokens", "4").map(|own| own.words);
        assert_eq!(words, Ok(vec!["--draft-tokens=4".to_owned()]));
        let words = member("method", "ngram").map(|own| own.words);
        assert_eq!(words, Ok(vec!["--speculate=ngram".to_owned()]));
    }

    #[test]
    fn what_corella_lacks_is_refused_by_name() {
        for (value, reason) in [
            (
                r#"{"method": "eagle3", "model": "x"}"#,
                "the method eagle3 is not there, because such heads",
            ),
            (
                r#"{"method": "deepseek_mtp"}"#,
                "the method deepseek_mtp is not there, because such heads",
            ),
            (
                r#"{"method": "suffix"}"#,
                "the method suffix is not there; ngram",
            ),
            (r#"{"method": "oracle"}"#, "the method oracle is not there"),
            (r#"{"method": "draft_model"}"#, "draft_model needs a model"),
            (r#"{"num_speculative_tokens": 4}"#, "it needs a method"),
            (
                r#"{"method": "ngram", "num_speculative_tokens": "4"}"#,
                "num_speculative_tokens must be a number",
            ),
            (
                r#"{"method": "ngram", "acceptance": "typical"}"#,
                "Corella has nothing like acceptance",
            ),
            ("ngram", "the value must be an object in JSON"),
        ] {
            let refusal = speculation(value).unwrap_err();
            assert!(refusal.starts_with(reason), "{value}: {refusal}");
        }
    }

    #[test]
    fn a_number_of_gibibytes_becomes_bytes() {
        let size = |value| {
            let options = ValueForm::Gibibytes.options("--x", None, value);
            options.map(|own| own.words)
        };
        assert_eq!(size("1.5"), Ok(vec!["--x=1610612736".to_owned()]));
        assert_eq!(size("0"), Ok(Vec::new()));
        for value in ["", "8G", "-1", "NaN", "inf"] {
            assert!(size(value).is_err(), "{value}");
        }
    }

    #[test]
    fn a_list_repeats_the_option() {
        let list = |form: ValueForm, value| form.options("--x", None, value).map(|own| own.words);
        let both = Ok(vec!["--x=a".to_owned(), "--x=b".to_owned()]);
        assert_eq!(list(ValueForm::JsonList, r#"["a", "b"]"#), both);
        assert_eq!(list(ValueForm::CommaList, "a, b"), both);
        let all = Ok(vec!["--x=*".to_owned()]);
        assert_eq!(list(ValueForm::JsonList, "*"), all);
        assert!(list(ValueForm::JsonList, "[*]").is_err());
    }
}
