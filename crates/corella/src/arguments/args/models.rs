//! Options of a server with several models.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use corella_server::KeepAlive;

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
