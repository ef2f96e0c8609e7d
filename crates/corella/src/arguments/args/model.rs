//! The options of the model and its folder.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use corella_model::{DType, WeightFormat};
use serde_json::{Map, Value};

use super::byte_size::parse_size_or_zero;
use super::token_count::{ModelLen, parse_model_len};
use crate::input::option_file;
use crate::options::generation_choice::{GenerationChoice, GenerationSource, overrides};
use crate::{Error, LlmOptions, ModelSource, WeightCache};

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors), GGUF file, or the name of a
    /// model on the Hugging Face hub, which is fetched if it is not there: OWNER/MODEL, with :Q4_K_M
    /// for one of its GGUF files and @REVISION for a branch, a tag or a commit [default: the built-in
    /// model]
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// The same as MODEL
    #[arg(
        short = 'm',
        long = "model",
        value_name = "MODEL",
        conflicts_with = "model"
    )]
    pub model_option: Option<PathBuf>,
    /// MODEL as it was given, if it names a model of the hub.
    #[arg(skip)]
    pub name: Option<String>,
    /// Branch, tag or commit of a model on the hub, as @REVISION behind its name
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// Fetch nothing: take a model that is named from the hub's cache, or refuse it. HF_HUB_OFFLINE=1
    /// does the same
    #[arg(long)]
    pub offline: bool,
    /// Most tokens of a prompt and its output together, such as 8192, 8k (8000) or 8K (8192) [default:
    /// the model's own limit]
    #[arg(long, value_name = "TOKENS", value_parser = parse_model_len, allow_negative_numbers = true)]
    pub max_model_len: Option<ModelLen>,
    /// Type of the weights. auto keeps the type of the checkpoint, except that integer weights of
    /// more than 4 bits become int8
    #[arg(long, value_enum, default_value_t)]
    pub dtype: WeightFormatArg,
    /// File with the chat template, in Jinja, or the template itself [default: the model's]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Variables of the chat template, as a JSON object, for requests that do not set them; for example
    /// '{"enable_thinking": false}'
    #[arg(
        long,
        value_name = "JSON",
        value_parser = parse_object,
        visible_alias = "chat-template-kwargs"
    )]
    pub default_chat_template_kwargs: Option<Map<String, Value>>,
    /// Where the sampling defaults come from: the model's generation_config.json (auto), none of them
    /// (vllm), or the generation_config.json of a folder
    #[arg(long, value_name = "auto|vllm|FOLDER", default_value = "auto")]
    pub generation_config: GenerationSource,
    /// Sampling defaults that replace those of --generation-config, as a JSON object with temperature,
    /// top_k, top_p, min_p, repetition_penalty or stop
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub override_generation_config: Option<Map<String, Value>>,
    /// Folder in which a server keeps quantised or repacked weights for its next start [default:
    /// ~/.cache/corella]
    #[arg(long, value_name = "FOLDER")]
    pub weight_cache: Option<PathBuf>,
    /// Disk space for the weight cache, all models together; the least recently used are deleted
    /// first. 0 switches the cache off
    #[arg(long, value_name = "SIZE", value_parser = parse_size_or_zero, default_value = "32G")]
    pub weight_cache_size: u64,
}

impl ModelArgs {
    pub fn source(self) -> ModelSource {
        source_of(self.model.or(self.model_option), self.name)
    }

    pub fn set(&self, options: &mut LlmOptions) -> Result<(), Error> {
        options.max_model_len = self.max_model_len.and_then(|len| len.0);
        options.weight_format = weight_format(self.dtype);
        options.chat_template = self
            .chat_template
            .as_deref()
            .map(template_source)
            .transpose()?;
        options.template_kwargs = self
            .default_chat_template_kwargs
            .clone()
            .unwrap_or_default();
        options.generation = GenerationChoice {
            source: self.generation_config.clone(),
            overrides: overrides(&self.override_generation_config.clone().unwrap_or_default())?,
        };
        let folder = self.weight_cache.clone().or_else(default_weight_cache);
        options.weight_cache =
            folder
                .filter(|_| self.weight_cache_size > 0)
                .map(|folder| WeightCache {
                    max_bytes: self.weight_cache_size,
                    ..WeightCache::new(folder)
                });
        Ok(())
    }
}

pub fn source_of(path: Option<PathBuf>, name: Option<String>) -> ModelSource {
    match (path, name) {
        (None, _) => ModelSource::BuiltIn,
        (Some(path), None) => ModelSource::Path(path),
        (Some(path), Some(name)) => ModelSource::Named { path, name },
    }
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("must be a JSON object: {error}"))
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WeightFormatArg {
    #[default]
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(alias = "float16", alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    /// 8-bit integers, one scale per output channel; inputs of these layers are rounded to 8 bits
    /// too
    Int8,
    /// 8-bit integers, one scale per group of 128 weights: more accurate than int8, slower prefill
    Int8Grouped,
    /// 4-bit integers, one scale per group of 128 weights; inputs of these layers are rounded to 8
    /// bits
    Int4,
}

pub fn weight_format(arg: WeightFormatArg) -> Option<WeightFormat> {
    match arg {
        WeightFormatArg::Auto => None,
        WeightFormatArg::F32 => Some(WeightFormat::Float(DType::F32)),
        WeightFormatArg::F16 => Some(WeightFormat::Float(DType::F16)),
        WeightFormatArg::Bf16 => Some(WeightFormat::Float(DType::Bf16)),
        WeightFormatArg::Int8 => Some(WeightFormat::Int8),
        WeightFormatArg::Int8Grouped => Some(WeightFormat::INT8_GROUPED),
        WeightFormatArg::Int4 => Some(WeightFormat::INT4),
    }
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
