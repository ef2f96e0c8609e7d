//! Options by keyword, for programs in other languages. A keyword is an option's name with `_` instead of `-`.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Args, Command, FromArgMatches};
use serde_json::{Map, Value};

use crate::arguments::args::LlmArgs;
use crate::arguments::config;
use crate::arguments::log_format;
use crate::command::model_lookup;
use crate::foreign::flag_table::{ENGINES, Flag, Treatment};
use crate::foreign::foreign_setting;
use crate::foreign::unknown_flag;
use crate::input::option_value::{OptionValue, find};
use crate::serve::local_server::LocalServer;

/// Loads the model that `keywords` name, with their options. A null keyword counts as absent.
///
/// Errors name options by their keywords.
pub fn load(keywords: &Map<String, Value>) -> Result<LocalServer, String> {
    log_format::start_quietly();
    let loaded = parse(keywords).and_then(|mut args| {
        let as_text = |error: crate::Error| error.to_string();
        model_lookup::resolve_llm(&mut args).map_err(as_text)?;
        let config = config::llm(args).map_err(as_text)?;
        LocalServer::load(config).map_err(as_text)
    });
    loaded.map_err(|message| in_keywords(&message))
}

/// Returns each keyword, and whether it takes a switch, one value or a list of values.
pub fn keywords() -> Vec<(String, KeywordKind)> {
    let command = command();
    let options = command.get_arguments();
    options
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| Some((arg.get_long()?.replace('-', "_"), KeywordKind::of(arg))))
        .collect()
}

/// Returns the names of vLLM's options that [`load`] takes although they are not options of Corella. Some are options
/// of vLLM's server alone.
pub fn foreign_keywords() -> Vec<String> {
    let command = command();
    let vllm = ENGINES[0].flags();
    let is_taken = |flag: &&Flag| match &flag.treatment {
        Treatment::NoOp(_) => true,
        Treatment::OtherName(other) => find(&command, long(&other.option)).is_some(),
        Treatment::Same { .. } | Treatment::Refused(_) => false,
    };
    let names = vllm.iter().filter(is_taken).flat_map(|flag| &flag.names);
    // `--no-x` is `x=False`.
    let names = names
        .filter(|name| name.starts_with("--"))
        .map(|name| long(name));
    let names = names.map(|name| name.strip_prefix("no-").unwrap_or(name));
    let mut names: Vec<String> = names
        .filter(|name| find(&command, name).is_none())
        .map(|name| name.replace('-', "_"))
        .collect();
    names.sort();
    names.dedup();
    names
}

fn long(option: &str) -> &str {
    option.trim_start_matches('-')
}

/// The kind of a keyword's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeywordKind {
    Switch,
    Value,
    List,
}

impl KeywordKind {
    fn of(arg: &Arg) -> Self {
        match arg.get_action() {
            action if !action.takes_values() => Self::Switch,
            ArgAction::Append => Self::List,
            _ => Self::Value,
        }
    }
}

fn command() -> Command {
    let mut command = LlmArgs::augment_args(Command::new("corella").disable_help_flag(true));
    command.build();
    command
}

/// Errors name options as on the command line.
fn parse(keywords: &Map<String, Value>) -> Result<LlmArgs, String> {
    let command = command();
    let mut words = vec![OsString::from("corella")];
    for (name, value) in keywords.iter().filter(|(_, value)| !value.is_null()) {
        let long = name.replace('_', "-");
        let Some(arg) = find(&command, &long) else {
            if !foreign_setting::is_known(name) {
                let known = command.get_arguments().filter_map(Arg::get_long);
                return Err(unknown_flag::refusal(&long, known));
            }
            let own = foreign_setting::translate(&command, None, name, value)?;
            for warning in &own.warnings {
                tracing::warn!("{}", in_keywords(warning));
            }
            words.extend(own.words);
            continue;
        };
        let is_json = arg
            .get_value_names()
            .unwrap_or_default()
            .iter()
            .any(|name| name == "JSON");
        let typed = match value {
            Value::Object(_) if is_json => OptionValue::Text(value.to_string()),
            value => OptionValue::from(value),
        };
        let arguments = typed.arguments(&command, arg);
        words.extend(arguments.map_err(|what| format!("--{long} {what}"))?);
    }
    let matches = command.try_get_matches_from(words).map_err(one_line)?;
    LlmArgs::from_arg_matches(&matches).map_err(one_line)
}

/// Returns clap's message without its hints about a command line.
fn one_line(error: clap::Error) -> String {
    let message = error.render().to_string();
    let message = message.trim_start_matches("error: ");
    let message = message.split("\n\n").next().unwrap_or(message);
    let lines: Vec<&str> = message.lines().map(str::trim).collect();
    lines.join(" ")
}

/// Replaces `--max-num-seqs`, or clap's `--max-num-seqs <N>`, by `max_num_seqs` in a message.
fn in_keywords(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("--") {
        let (before, from) = rest.split_at(at);
        let is_start = !before.ends_with(|c: char| c.is_alphanumeric() || c == '-');
        let behind = &from[2..];
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let len = behind.find(|c| !is_part(c)).unwrap_or(behind.len());
        let name = behind[..len].trim_end_matches('-');
        text.push_str(before);
        if !is_start || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
            text.push_str("--");
            rest = behind;
            continue;
        }
        text.push_str(&name.replace('-', "_"));
        rest = &behind[name.len()..];
        if let Some((placeholder, after)) = rest
            .strip_prefix(" <")
            .and_then(|from| from.split_once('>'))
            && placeholder
                .chars()
                .all(|c| c.is_ascii_uppercase() || "_|=".contains(c))
        {
            rest = after;
        }
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse_json(keywords: Value) -> Result<LlmArgs, String> {
        let keywords = keywords.as_object().expect("the test gives an object");
        parse(keywords).map_err(|message| in_keywords(&message))
    }

    #[test]
    fn keywords_are_the_options_of_the_command_line() {
        let args = parse_json(json!({
            "model": "some/model",
            "max_num_seqs": 7,
            "max_pinned_share": 0.5,
            "kv_cache_memory": "64M",
            "kv_dtype": "int8",
            "enable_prefix_caching": false,
            "served_model_name": ["a", "b"],
            "threads": null,
            "seed": 5,
            "default_chat_template_kwargs": {"enable_thinking": false},
            "trust_remote_code": true,
            "tensor_parallel_size": 1,
        }));
        let args = args.unwrap();
        assert_eq!(args.model.model_option, Some("some/model".into()));
        assert_eq!(args.engine.scheduler.max_num_seqs, 7);
        assert_eq!(args.engine.cache.max_pinned_share, 0.5);
        assert_eq!(args.engine.cache.kv_cache_memory, Some(64 << 20));
        assert!(args.engine.cache.no_enable_prefix_caching);
        assert_eq!(args.request.served_model_name, ["a", "b"]);
        let kwargs = args.model.default_chat_template_kwargs.unwrap_or_default();
        assert_eq!(kwargs["enable_thinking"], false);
        assert_eq!(
            (args.request.seed, args.engine.device.threads),
            (Some(5), None)
        );
    }

    #[test]
    fn options_of_vllm_are_those_of_the_same_effect() {
        let args = parse_json(json!({
            "kv_cache_memory_bytes": 64 << 20,
            "enable_chunked_prefill": false,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            "skip_tokenizer_init": false,
            "enable_lora": false,
            "enforce_eager": false,
            "compilation_config": {"mode": 3},
            "hf_overrides": null,
        }));
        let args = args.unwrap();
        assert_eq!(args.engine.cache.kv_cache_memory, Some(64 << 20));
        assert!(args.engine.scheduler.no_chunked_prefill);
        assert_eq!(args.engine.speculation.draft_tokens, Some(3));
        let args = parse_json(json!({"enable_chunked_prefill": true})).unwrap();
        assert!(!args.engine.scheduler.no_chunked_prefill);
        for (keywords, message) in [
            (
                json!({"skip_tokenizer_init": true}),
                "there is no option skip_tokenizer_init: the tokenizer comes from",
            ),
            (
                json!({"speculative_config": {"method": "eagle3"}}),
                "speculative_config",
            ),
            (
                json!({"lora_modules": ["sql=adapters/sql"]}),
                "there is no option lora_modules: only commands such as `corella serve` have it",
            ),
        ] {
            let refused = parse_json(keywords.clone()).err().unwrap_or_default();
            assert!(refused.contains(message), "{keywords}: {refused}");
        }
    }

    #[test]
    fn every_foreign_keyword_is_taken_with_some_value() {
        let names = foreign_keywords();
        assert!(names.len() > 100, "{names:?}");
        for name in names {
            let values = json!([
                false,
                1,
                0,
                "auto",
                "assistant",
                "mp",
                "awq",
                "ngram",
                "raw_logprobs",
                {"method": "ngram"}
            ]);
            let values = values.as_array().unwrap();
            let is_taken = |value: &&Value| parse_json(json!({ (&name): value })).is_ok();
            assert!(values.iter().any(|value| is_taken(&value)), "{name}");
        }
    }

    #[test]
    fn mistakes_are_told_by_keyword() {
        for (keywords, message) in [
            (
                json!({"max_num_seq": 1}),
                "there is no option max_num_seq; did you mean max_num_seqs?",
            ),
            (json!({"help": true}), "there is no option help"),
            (
                json!({"mem_fraction_static": 0.9}),
                "there is no option mem_fraction_static: use gpu_memory_utilization, or kv_cache_memory to say",
            ),
            (json!({"max_num_seqs": [1]}), "max_num_seqs takes one value"),
            (
                json!({"tensor_parallel_size": 2}),
                "tensor_parallel_size 2: matrices are not split",
            ),
            (
                json!({"pin_threads": "yes"}),
                "pin_threads must be true or false",
            ),
            (
                json!({"max_num_seqs": "many"}),
                "invalid value 'many' for 'max_num_seqs'",
            ),
            (
                json!({"dtype": "fp7"}),
                "invalid value 'fp7' for 'dtype' [possible values: auto,",
            ),
            (
                json!({"kv_cache_memory": "3 apples"}),
                "invalid value '3 apples' for 'kv_cache_memory': unknown unit",
            ),
            (
                json!({"pin_prefix": ["a"], "enable_prefix_caching": false}),
                "cannot be used with",
            ),
        ] {
            let refused = parse_json(keywords.clone()).err().unwrap_or_default();
            assert!(refused.contains(message), "{keywords}: {refused}");
            assert!(!refused.contains("--"), "{refused}");
        }
    }

    #[test]
    fn dashes_that_are_no_option_stay() {
        for text in ["a -- b", "a--b", "--- x", "--X"] {
            assert_eq!(in_keywords(text), text);
        }
        assert_eq!(in_keywords("--threads 9 and --x-y."), "threads 9 and x_y.");
        assert_eq!(in_keywords("--a <b>"), "a <b>");
    }

    #[test]
    fn every_option_has_a_kind() {
        let keywords = keywords();
        let kind = |name: &str| {
            let found = keywords.iter().find(|(known, _)| known == name);
            found.map(|(_, kind)| *kind)
        };
        assert_eq!(kind("max_num_seqs"), Some(KeywordKind::Value));
        assert_eq!(kind("pin_threads"), Some(KeywordKind::Switch));
        assert_eq!(kind("served_model_name"), Some(KeywordKind::List));
        assert_eq!(kind("help"), None);
    }
}
