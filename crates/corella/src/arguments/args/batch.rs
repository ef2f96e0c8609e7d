//! The options of `corella batch`.

use std::path::PathBuf;

use clap::Args;

use super::{ConfigFileArgs, LlmArgs};

#[derive(Args)]
pub struct BatchArgs {
    /// Requests, one JSON object in each line, as OpenAI's batch API takes them
    #[arg(value_name = "IN.jsonl")]
    pub input: PathBuf,
    /// File for the answers, one in each line. If it exists, requests that it answers are not sent
    /// again
    #[arg(short, long, value_name = "OUT.jsonl")]
    pub output: PathBuf,
    /// Maximum number of requests to answer at once [default: twice --max-num-seqs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,

    #[command(flatten)]
    pub llm: LlmArgs,
}
