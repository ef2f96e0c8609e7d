//! The options about LoRA adapters.

use std::time::Duration;

use clap::Args;
use corella_server::ServeConfig;
use serde_json::Value;

use crate::{Error, LlmOptions};

#[derive(Args)]
#[command(next_help_heading = "Adapters")]
pub struct AdapterArgs {
    /// Enable LoRA adapters, which can be loaded and unloaded while the server runs
    #[arg(long)]
    pub enable_lora: bool,
    /// Load the LoRA adapter of a folder under a name that requests give as their model; repeat the option
    /// for more adapters. Implies --enable-lora
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1..)]
    pub lora_modules: Vec<String>,
    /// Keep at most this many adapters loaded
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_loras: usize,
    /// Largest rank that an adapter may have
    #[arg(long, value_name = "RANK", default_value_t = 64)]
    pub max_lora_rank: u16,
    /// Give up an adapter that is not read within this time, while the server runs
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub adapter_load_timeout: u32,
}

impl AdapterArgs {
    /// Sets the limits of adapters. Returns the name and the folder of each adapter to load at the start.
    pub fn set(
        &self,
        options: &mut LlmOptions,
        limits: &mut ServeConfig,
    ) -> Result<Vec<(String, String)>, Error> {
        let modules = self
            .lora_modules
            .iter()
            .map(|module| {
                let parsed = named_folder(module);
                parsed.filter(|(name, path)| !name.is_empty() && !path.is_empty()).ok_or_else(|| {
                    Error::Config(format!(
                        "--lora-modules {module} must have the form NAME=FOLDER, for example sql=adapters/sql"
                    ))
                })
            });
        let modules = modules.collect::<Result<Vec<_>, _>>()?;
        if modules.len() > self.max_loras {
            return Err(Error::Config(format!(
                "--lora-modules names {} adapters, and --max-loras is {}",
                modules.len(),
                self.max_loras
            )));
        }
        if self.max_lora_rank == 0 {
            return Err(Error::Config(
                "--max-lora-rank must be at least 1".to_owned(),
            ));
        }
        if self.enable_lora || !modules.is_empty() {
            options.max_adapter_rank = Some(self.max_lora_rank.into());
        }
        limits.max_num_adapters = self.max_loras;
        limits.adapter_load_timeout = Duration::from_secs(self.adapter_load_timeout.into());
        Ok(modules)
    }
}

/// Parses `NAME=FOLDER`, or vLLM's JSON, `{"name": NAME, "path": FOLDER}`.
fn named_folder(module: &str) -> Option<(String, String)> {
    if module.starts_with('{') {
        let module: Value = serde_json::from_str(module).ok()?;
        let text = |name: &str| module[name].as_str().map(str::to_owned);
        return Some((text("name")?, text("path")?));
    }
    let (name, path) = module.split_once('=')?;
    Some((name.to_owned(), path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_named_in_two_forms() {
        let sql = Some(("sql".to_owned(), "adapters/sql".to_owned()));
        assert_eq!(named_folder("sql=adapters/sql"), sql);
        let json = r#"{"name": "sql", "path": "adapters/sql", "base_model_name": "x"}"#;
        assert_eq!(named_folder(json), sql);
        for wrong in ["sql", r#"{"name": "sql"}"#, "{"] {
            assert_eq!(named_folder(wrong), None, "{wrong}");
        }
    }
}
