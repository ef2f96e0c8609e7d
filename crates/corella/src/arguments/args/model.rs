//! The options of the model and its folder.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use serde_json::{Map, Value};

use super::WeightFormatArg;
use super::byte_size::parse_size_or_zero;
use super::token_count::{ModelLen, parse_model_len};

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
    /// The name by which MODEL was given, if it is one of the hub.
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
    pub generation_config: GenerationConfigArg,
    /// Sampling defaults that replace those of --generation-config, as a JSON object with temperature,
    /// top_k, top_p, min_p or repetition_penalty
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerationConfigArg {
    /// The model's own.
    Auto,
    /// None: the defaults of the API.
    Vllm,
    Folder(PathBuf),
}

impl FromStr for GenerationConfigArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            "vllm" => Self::Vllm,
            folder => Self::Folder(folder.into()),
        })
    }
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("must be a JSON object: {error}"))
}
