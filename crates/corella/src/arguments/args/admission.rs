//! The command line of `corella bench admission`.

use std::path::PathBuf;

use clap::Args;
use corella_bench::admission::{RULES, Rule};

use super::bench::{JsonArgs, TraceScaleArgs, parse_range};
use super::{LenRange, PageArgs};

#[derive(Args)]
pub struct BenchAdmissionArgs {
    /// Rules to compare
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        value_parser = parse_rule,
        default_values = RULES.iter().map(|rule| rule.name)
    )]
    pub rules: Vec<&'static Rule>,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub load: ReplayLoadArgs,
    #[command(flatten)]
    pub scheduler: ReplaySchedulerArgs,
    #[command(flatten)]
    pub cost: CostArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Load")]
pub struct ReplayLoadArgs {
    /// Replay a trace: JSON lines with timestamp, input_length and output_length, or a .csv file with
    /// the columns TIMESTAMP, ContextTokens and GeneratedTokens
    #[arg(long, value_name = "FILE", required_unless_present = "prompt_len")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub scale: TraceScaleArgs,
    /// Multiply the output lengths of --trace by this factor [default: --length-scale]
    #[arg(long, value_name = "X", requires = "trace")]
    pub output_scale: Option<f64>,
    /// Length of the prompts in tokens; with 100-300, each has a random length from 100 to 300
    #[arg(long, value_name = "N", value_parser = parse_range, requires = "output_len", conflicts_with = "trace")]
    pub prompt_len: Option<LenRange>,
    /// Length of the outputs in tokens, or a range as for --prompt-len
    #[arg(long, value_name = "N", value_parser = parse_range, requires = "prompt_len")]
    pub output_len: Option<LenRange>,
    /// Seed of the random lengths
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Number of requests [default: all of the trace, or 300 without one]
    #[arg(long, value_name = "N")]
    pub num_requests: Option<usize>,
    /// Let this many requests per second arrive, at even intervals [default: as in the trace, or all
    /// at once without one]
    #[arg(long, value_name = "X", conflicts_with = "time_scale")]
    pub request_rate: Option<f64>,
    /// Let all requests of the trace arrive at once
    #[arg(long, conflicts_with_all = ["request_rate", "time_scale"])]
    pub at_once: bool,
}

#[derive(Args)]
#[command(next_help_heading = "Scheduler")]
pub struct ReplaySchedulerArgs {
    /// Size of the KV cache, in tokens
    #[arg(long, value_name = "TOKENS")]
    pub kv_cache_tokens: u32,
    #[command(flatten)]
    pub page: PageArgs,
    /// Let a preempted request find its own KV pages again; no two prompts share a prefix
    #[arg(long)]
    pub prefix_caching: bool,
    /// Maximum number of tokens of a prompt and its output together
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072)]
    pub max_model_len: u32,
    /// Maximum number of requests that run at once
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step, prefill and decode together
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub max_num_batched_tokens: u32,
    /// Maximum number of prefill tokens in one step [default: --max-num-batched-tokens]
    #[arg(long, value_name = "N")]
    pub max_prefill_tokens: Option<u32>,
}

#[derive(Args)]
#[command(next_help_heading = "Cost")]
pub struct CostArgs {
    /// Time of every step, in microseconds
    #[arg(long, value_name = "US", default_value_t = 20_000.0)]
    pub step_us: f64,
    /// Further time for each token of a step, in microseconds
    #[arg(long, value_name = "US", default_value_t = 50.0)]
    pub token_us: f64,
    /// Further time for each thousand positions that the tokens of a step attend to, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0.5)]
    pub attended_kilotoken_us: f64,
}

fn parse_rule(text: &str) -> Result<&'static Rule, String> {
    Rule::named(text).ok_or_else(|| {
        let names: Vec<_> = RULES.iter().map(|rule| rule.name).collect();
        format!("must be one of {}", names.join(", "))
    })
}
