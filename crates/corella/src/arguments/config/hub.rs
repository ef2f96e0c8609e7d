//! The address of the hub and its cache's folder, by the variables of `huggingface_hub`.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use corella_hub::{HubConfig, OllamaStore};

use crate::arguments::args::PullArgs;
use crate::input::option_file;

const NUM_PARALLEL: usize = 8;
const READ_TIMEOUT_S: u64 = 30;

pub fn pull(args: &PullArgs) -> HubConfig {
    HubConfig {
        num_parallel: args.max_workers.into(),
        ..hub(false)
    }
}

pub fn hub(is_offline: bool) -> HubConfig {
    let home = path("HF_HOME").unwrap_or_else(|| caches().join("huggingface"));
    let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
    let endpoint = text("HF_ENDPOINT");
    let is_set = |name: &str| {
        let value = text(name).unwrap_or_default().to_ascii_uppercase();
        matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
    };
    let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
    let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
    let from_file = || {
        let token = option_file::read_text(&token_file).ok()?.trim().to_owned();
        (!token.is_empty()).then_some(token)
    };
    let ca_file = path("SSL_CERT_FILE").or_else(|| path("REQUESTS_CA_BUNDLE"));
    let read_timeout = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
    let read_timeout = read_timeout.filter(|&seconds: &u64| seconds > 0);
    HubConfig {
        endpoint: endpoint.unwrap_or_else(|| "https://huggingface.co".to_owned()),
        token: token.or_else(from_file),
        cache: cache.unwrap_or_else(|| home.join("hub")),
        ca_file,
        is_offline: is_offline || is_set("HF_HUB_OFFLINE"),
        num_parallel: NUM_PARALLEL,
        read_timeout: Duration::from_secs(read_timeout.unwrap_or(READ_TIMEOUT_S)),
    }
}

/// Returns Ollama's models: in the folder that OLLAMA_MODELS names, or in the usual folders of Ollama's installers.
pub fn ollama_store() -> OllamaStore {
    let usual = || {
        vec![
            home_folder().join(".ollama/models"),
            "/usr/share/ollama/.ollama/models".into(),
        ]
    };
    OllamaStore::new(path("OLLAMA_MODELS").map_or_else(usual, |folder| vec![folder]))
}

/// Returns a variable's value unless it is blank.
fn text(name: &str) -> Option<String> {
    let text = env::var(name).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Returns a path with `~` replaced by the home folder.
fn path(name: &str) -> Option<PathBuf> {
    let text = text(name)?;
    let in_home = text.strip_prefix("~/").map(|rest| home_folder().join(rest));
    Some(in_home.unwrap_or_else(|| text.into()))
}

fn caches() -> PathBuf {
    path("XDG_CACHE_HOME").unwrap_or_else(|| home_folder().join(".cache"))
}

/// Returns the home folder, or the working directory if there is none.
fn home_folder() -> PathBuf {
    env::home_dir().unwrap_or_else(|| PathBuf::from("."))
}
