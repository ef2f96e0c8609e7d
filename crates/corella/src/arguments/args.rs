//! The command line as typed. `config.rs` converts it to the configuration of a command.

mod adapter;
mod admission;
mod batch;
mod bench;
mod byte_size;
mod cache;
mod chat;
mod cluster;
mod config_file;
mod device;
mod duration;
mod engine;
mod files;
mod format_choice;
mod hub;
mod inspect;
mod kv_disk;
mod kv_store;
mod llm;
mod manual;
mod mock_time;
mod model;
mod models;
mod quantize;
mod remote;
mod request;
mod run;
mod sampling;
mod scheduler;
mod server;
mod share;
mod speculation;
mod token_count;

use clap::{Args, Parser, Subcommand};

pub use adapter::AdapterArgs;
pub use admission::BenchAdmissionArgs;
pub use batch::BatchArgs;
pub use bench::{
    BenchCacheArgs, BenchCommand, BenchCompareArgs, BenchKernelsArgs, BenchOfflineArgs,
    BenchPerplexityArgs, BenchSchedulerArgs, BenchServeArgs, BenchTransferArgs, EndpointArg,
    LenRange, ReportArgs,
};
pub use cache::{CacheArgs, KvFormatArg, PageArgs, kv_format};
pub use chat::ChatArgs;
pub use cluster::ClusterArgs;
pub use config_file::ConfigFileArgs;
pub use device::{DeviceArgs, IsaArg, check_threads, isa};
pub use engine::{EngineArgs, OwnModelArgs};
pub use files::FilesArgs;
pub use format_choice::FormatChoice;
pub use hub::{PullArgs, RmArgs};
pub use inspect::InspectArgs;
pub use kv_disk::KvDiskArgs;
pub use kv_store::{KvStoreAddress, KvStoreArgs};
pub use llm::LlmArgs;
pub use manual::{CompletionsArgs, ManArgs};
pub use mock_time::MockTimeArgs;
pub use model::{ModelArgs, WeightFormatArg, own_folder, source_of, weight_format};
pub use models::{ListedModel, ModelsArgs};
pub use quantize::{GroupLen, MethodArg, QuantizeArgs, QuantizeFormatArg};
pub use remote::{PsArgs, ServerUrlArgs, StopArgs};
pub use request::RequestArgs;
pub use run::RunArgs;
pub use sampling::SamplingArgs;
pub use scheduler::SchedulerArgs;
pub use server::{LogFormatArg, ServerArgs};
pub use speculation::{SpeculateArg, SpeculationArgs};

/// Serves large language models
#[derive(Parser)]
#[command(
    name = "corella",
    version,
    max_term_width = 100,
    propagate_version = true,
    args_override_self = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Serve a model over an OpenAI-compatible API
    Serve(Box<ServeArgs>),
    /// Write a model's answer to standard output, and its speed to standard error
    Generate(Box<GenerateArgs>),
    /// Converse with a model in the terminal
    Chat(Box<ChatArgs>),
    /// Answer a prompt, or converse without one, as `ollama run` does
    Run(Box<RunArgs>),
    /// Answer the requests of a file, without a server
    Batch(Box<BatchArgs>),
    /// Describe a model: its architecture, its size, and whether Corella can serve it
    Inspect(InspectArgs),
    /// Write a model as a folder with integer weights
    Quantize(QuantizeArgs),
    /// Download models from the Hugging Face hub, and print their paths
    Pull(PullArgs),
    /// List downloaded models, those of other programs included
    List,
    /// Delete downloaded models
    Rm(RmArgs),
    /// List the loaded models of a running server
    Ps(PsArgs),
    /// Unload models of a running server
    Stop(StopArgs),
    /// Measure latency, throughput and memory, of a server or of a part of Corella
    #[command(subcommand)]
    Bench(Box<BenchCommand>),
    /// Print a shell completion script
    Completions(CompletionsArgs),
    /// Print a manual page
    Man(ManArgs),
}

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,
    #[command(flatten)]
    pub models: ModelsArgs,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub request: RequestArgs,
    #[command(flatten)]
    pub adapter: AdapterArgs,
    #[command(flatten)]
    pub files: FilesArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub kv_store: KvStoreArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

#[derive(Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,

    /// The prompt: a user message, or with --raw a text to continue; - reads it from standard input, as
    /// does a command without a prompt
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Whether piped input comes before the prompt, as with `corella run`.
    #[arg(skip)]
    pub with_input: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["raw", "prompt_tokens"])]
    pub system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Use a made-up prompt of this many tokens, for measurements
    #[arg(long, value_name = "N", conflicts_with = "prompt")]
    pub prompt_tokens: Option<usize>,
    /// Generate at most this many tokens [default: as many as the context allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Continue after an end token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Do not measure the machine's limits for comparison
    #[arg(long)]
    pub no_limits: bool,
    /// Whether to leave out the speed, as `corella run` does.
    #[arg(skip)]
    pub no_speed: bool,
    /// Show the time that each operation took, beside the machine's limits
    #[arg(long, conflicts_with = "no_limits")]
    pub profile: bool,

    #[command(flatten)]
    pub own: OwnModelArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(line: &str) -> ServeArgs {
        let words = line.split_whitespace();
        match Cli::try_parse_from(words).map(|cli| cli.command) {
            Ok(Command::Serve(args)) => *args,
            Ok(_) => panic!("{line} is another command"),
            Err(error) => panic!("{error}"),
        }
    }

    /// A start script may append options to a wrapper's command line. The appended values win, as with other servers.
    #[test]
    fn the_last_of_several_values_counts_and_lists_grow() {
        let args = serve(
            "corella serve x --port 1 --threads 2 --port 3 --threads=4 --pin-threads --pin-threads \
             --served-model-name a --pin-prefix p --served-model-name b --pin-prefix q \
             --enable-prefix-caching --no-enable-prefix-caching --enable-prefix-caching",
        );
        assert_eq!((args.server.port, args.engine.device.threads), (3, Some(4)));
        assert!(args.engine.device.pin_threads);
        assert_eq!(args.request.served_model_name, ["a", "b"]);
        assert_eq!(args.engine.cache.pin_prefix, ["p", "q"]);
        assert!(args.engine.cache.enable_prefix_caching);
    }
}
