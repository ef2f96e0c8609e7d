//! Options of a server with several models.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use corella_server::KeepAlive;

use super::ServeArgs;
use super::byte_size::parse_size;
use super::duration::parse_duration;
use crate::ModelSource;

#[derive(Args)]
#[command(next_help_heading = "Several models")]
pub struct ModelsArgs {
    /// Further models. Each is loaded when a request first names it, and unloaded when it is idle or another needs the
    /// memory
    #[arg(value_name = "MODEL")]
    pub more_models: Vec<PathBuf>,
    /// `more_models`, found.
    #[arg(skip)]
    pub more_sources: Vec<ModelSource>,
    /// TOML file with models: a table [models.NAME] for each, with a path or a name of the hub as `model`, and any
    /// option of a model in place of the one given here; `pinned = true` loads it at the start and never unloads it
    #[arg(long = "models", value_name = "FILE")]
    pub models_file: Option<PathBuf>,
    /// The models of `models_file`.
    #[arg(skip)]
    pub listed: Vec<ListedModel>,
    /// Serve the models in this folder: its folders with a config.json, and its GGUF files. It is read at the start
    #[arg(long, value_name = "FOLDER")]
    pub models_dir: Option<PathBuf>,
    /// Let requests name models of the hub's cache, where `corella pull` puts them, that are not named here. Nothing
    /// is fetched for a request
    #[arg(long)]
    pub allow_hub_models: bool,
    /// Unload a model that no request has used for this long, such as 10m; 0 unloads it when its last request has
    /// ended, and -1 never. A request of Ollama's API may say otherwise for its model [default: 5m with several
    /// models, -1 with one]
    #[arg(long, value_name = "DURATION", value_parser = parse_keep_alive, allow_negative_numbers = true)]
    pub keep_alive: Option<KeepAlive>,
    /// Longest time that a request waits for its model to be loaded
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub model_load_timeout: u32,
    /// Memory of all loaded models together: weights, KV caches and working memory. Without --kv-cache-memory, the KV
    /// cache of a model takes at most a quarter of what its weights leave of it [default: four fifths of the
    /// machine's or container's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub model_memory: Option<u64>,
}

impl ModelsArgs {
    /// Returns whether models come from elsewhere than the command line, so that the built-in one is served only if it is
    /// named.
    pub fn has_other_places(&self) -> bool {
        self.models_file.is_some() || self.models_dir.is_some()
    }

    /// Returns whether the models are loaded by requests, even if there is only one.
    pub fn has_several(&self) -> bool {
        !self.more_models.is_empty() || self.has_other_places() || self.allow_hub_models
    }
}

/// A model of `--models FILE`.
pub struct ListedModel {
    pub name: String,
    /// The file, and the line of the model's table.
    pub place: String,
    /// The file, and the line of `model`.
    pub model_place: String,
    pub is_pinned: bool,
    /// The command line with the options of the table.
    pub args: Box<ServeArgs>,
}

fn parse_keep_alive(text: &str) -> Result<KeepAlive, String> {
    let text = text.trim();
    if let Some(positive) = text.strip_prefix('-') {
        return parse_duration(positive).map(|_| KeepAlive::Forever);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    match digits.parse::<u64>() {
        Ok(0) => Ok(KeepAlive::For(Duration::ZERO)),
        _ => parse_duration(text).map(KeepAlive::For),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_stays_for_a_while_or_forever() {
        let seconds = |seconds| Ok(KeepAlive::For(Duration::from_secs(seconds)));
        for (text, expected) in [
            ("10m", seconds(600)),
            ("90", seconds(90)),
            ("0", seconds(0)),
            ("0s", seconds(0)),
            ("-1", Ok(KeepAlive::Forever)),
            ("-1m", Ok(KeepAlive::Forever)),
        ] {
            assert_eq!(parse_keep_alive(text), expected, "{text}");
        }
        for text in ["", "-", "never", "1w", "--1"] {
            assert!(parse_keep_alive(text).is_err(), "{text}");
        }
    }
}
