//! The command line of `corella inspect`.

use std::path::PathBuf;

use clap::Args;
use corella_engine::KvDiskFolder;

use super::byte_size::parse_size;
use super::kv_disk::parse_folder;
use super::scheduler::defaults;
use super::token_count::{ModelLen, parse_model_len};
use super::{IsaArg, KvFormatArg, PageArgs, WeightFormatArg};

fn of_a_model() -> [&'static str; 8] {
    [
        "model",
        "dtype",
        "kv_cache_dtype",
        "kv_cache_memory",
        "max_model_len",
        "max_num_seqs",
        "block_size",
        "isa",
    ]
}

#[derive(Args)]
pub struct InspectArgs {
    /// Hugging Face folder, GGUF file or name of a model on the hub, to read [default: the built-in model]
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// MODEL as it was given, if it names a model of the hub.
    #[arg(skip)]
    pub name: Option<String>,
    /// Download nothing: a named model must be in the hub's cache. HF_HUB_OFFLINE=1 does the same
    #[arg(long)]
    pub offline: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// List the files of KV blocks in a folder that `--kv-disk` of `corella serve` names. Reads all of them and changes
    /// nothing. Servers may use the files meanwhile. Repeat the option for further folders
    #[arg(long, value_name = "DIR", value_parser = parse_folder, conflicts_with_all = of_a_model())]
    pub kv_disk: Vec<KvDiskFolder>,
    /// Type of the weights in memory, as for `corella serve`
    #[arg(long, value_enum, default_value_t)]
    pub dtype: WeightFormatArg,
    /// Type of keys and values, as for `corella serve`
    #[arg(long, value_enum, visible_alias = "kv-dtype", default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    /// Memory for the KV cache [default: what `corella serve` would take on this machine now]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Maximum number of tokens of a prompt and its output together, such as 8192, 8k (8000) or 8K (8192);
    /// auto takes the most that model and memory allow [default: auto]
    #[arg(long, value_name = "TOKENS", value_parser = parse_model_len, allow_negative_numbers = true)]
    pub max_model_len: Option<ModelLen>,
    /// Maximum number of requests that run at once
    #[arg(long, value_name = "N", default_value_t = defaults().max_num_seqs)]
    pub max_num_seqs: u32,
    #[command(flatten)]
    pub page: PageArgs,
    /// CPU instruction set for which weights are packed [default: the best that this machine has]
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
}
