//! The options about LoRA adapters, checked.

use std::time::Duration;

use serde_json::Value;

use crate::arguments::args::AdapterArgs;
use crate::{Error, LlmOptions};

/// The adapters of a server at its start.
#[derive(Clone, Debug, Default)]
pub struct AdapterOptions {
    /// Names and folders.
    pub modules: Vec<(String, String)>,
    pub max_adapters: usize,
    pub load_timeout: Duration,
}

pub fn adapter(options: &mut LlmOptions, args: AdapterArgs) -> Result<AdapterOptions, Error> {
    let modules = args
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
    if modules.len() > args.max_loras {
        return Err(Error::Config(format!(
            "--lora-modules names {} adapters, and --max-loras is {}",
            modules.len(),
            args.max_loras
        )));
    }
    if args.max_lora_rank == 0 {
        return Err(Error::Config(
            "--max-lora-rank must be at least 1".to_owned(),
        ));
    }
    if args.enable_lora || !modules.is_empty() {
        options.max_adapter_rank = Some(args.max_lora_rank.into());
    }
    Ok(AdapterOptions {
        modules,
        max_adapters: args.max_loras,
        load_timeout: Duration::from_secs(args.adapter_load_timeout.into()),
    })
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
