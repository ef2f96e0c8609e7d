//! The model to run, and how its folder is read.

use std::path::{Path, PathBuf};

use super::engine::weight_format;
use crate::arguments::args::{GenerationConfigArg, ModelArgs};
use crate::input::option_file;
use crate::options::generation_choice::{GenerationChoice, GenerationSource, overrides};
use crate::{Error, LlmOptions, ModelSource, WeightCache};

pub fn source(args: ModelArgs) -> ModelSource {
    source_of(args.model.or(args.model_option), args.name)
}

pub fn source_of(path: Option<PathBuf>, name: Option<String>) -> ModelSource {
    match (path, name) {
        (None, _) => ModelSource::BuiltIn,
        (Some(path), None) => ModelSource::Path(path),
        (Some(path), Some(name)) => ModelSource::Named { path, name },
    }
}

pub fn set_model(options: &mut LlmOptions, args: &ModelArgs) -> Result<(), Error> {
    options.max_model_len = args.max_model_len.and_then(|len| len.0);
    options.weight_format = weight_format(args.dtype);
    options.chat_template = args
        .chat_template
        .as_deref()
        .map(template_source)
        .transpose()?;
    options.template_kwargs = args
        .default_chat_template_kwargs
        .clone()
        .unwrap_or_default();
    options.generation = GenerationChoice {
        source: match &args.generation_config {
            GenerationConfigArg::Auto => GenerationSource::Model,
            GenerationConfigArg::Vllm => GenerationSource::Neutral,
            GenerationConfigArg::Folder(folder) => GenerationSource::Folder(folder.clone()),
        },
        overrides: overrides(&args.override_generation_config.clone().unwrap_or_default())?,
    };
    let folder = args.weight_cache.clone().or_else(default_weight_cache);
    options.weight_cache =
        folder
            .filter(|_| args.weight_cache_size > 0)
            .map(|folder| WeightCache {
                max_bytes: args.weight_cache_size,
                ..WeightCache::new(folder)
            });
    Ok(())
}

/// Returns the template in a file, or the template given instead of a file's name.
fn template_source(given: &str) -> Result<String, Error> {
    match option_file::read_text(Path::new(given)) {
        Ok(source) => Ok(source),
        Err(_) if given.contains("{{") || given.contains("{%") => Ok(given.to_owned()),
        Err(error) => Err(Error::Io(
            format!(
                "--chat-template cannot read {given}; no templates are built in, so that it must be a file or Jinja"
            ),
            error,
        )),
    }
}

fn default_weight_cache() -> Option<PathBuf> {
    own_folder("XDG_CACHE_HOME", ".cache")
}

/// Returns Corella's folder below one of the XDG base directories: `variable` names it, or else it is `in_home`.
/// Returns `None` without a home folder.
pub fn own_folder(variable: &str, in_home: &str) -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let base = absolute(variable).or_else(|| Some(absolute("HOME")?.join(in_home)));
    Some(base?.join("corella"))
}
