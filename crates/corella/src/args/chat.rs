//! The options of `corella chat`.

use clap::Args;
use clap::builder::FalseyValueParser;

use super::{CacheArgs, ConfigFileArgs, DeviceArgs, ModelArgs, SamplingArgs, SpeculationArgs};

#[derive(Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,

    /// System message that the conversation begins with
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Generate at most this many tokens for each answer [default: as many as the context allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Neither read nor write the input history. Otherwise the last 1000 messages are kept in
    /// ~/.local/state/corella/chat_history
    #[arg(long, env = "CORELLA_NO_HISTORY", value_parser = FalseyValueParser::new())]
    pub no_history: bool,

    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}
