//! The options about LoRA adapters, checked.

use std::time::Duration;

use crate::args::AdapterArgs;
use crate::{Error, LlmOptions};

/// The adapters that a server begins with.
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
        .map(|module| match module.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok((name.to_owned(), path.to_owned()))
            }
            _ => Err(Error::Config(format!(
                "--lora-modules {module} must have the form NAME=FOLDER, for example sql=adapters/sql"
            ))),
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
