//! What was typed after `corella bench admission`.

use std::path::PathBuf;

use clap::Args;
use corella_bench::admission::{RULES, Rule};

use super::LenRange;
use super::bench::parse_range;

#[derive(Args)]
pub struct BenchAdmissionArgs {
    /// A trace: JSON lines with timestamp, input_length and output_length, or a .csv file with the
    /// columns TIMESTAMP, ContextTokens and GeneratedTokens
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "prompt_len",
        help_heading = "Load"
    )]
    pub trace: Option<PathBuf>,
    /// Factor for the lengths of --trace
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "trace",
        help_heading = "Load"
    )]
    pub length_scale: f64,
    /// Factor for the outputs of --trace alone [default: --length-scale]
    #[arg(long, value_name = "X", requires = "trace", help_heading = "Load")]
    pub output_scale: Option<f64>,
    /// Factor for the times of --trace
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "trace",
        conflicts_with_all = ["request_rate", "at_once"],
        help_heading = "Load"
    )]
    pub time_scale: f64,
    /// Tokens of every prompt; of 100-300 each has its own, at random
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_range,
        requires = "output_len",
        conflicts_with = "trace",
        help_heading = "Load"
    )]
    pub prompt_len: Option<LenRange>,
    /// New tokens of every request, likewise
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_range,
        requires = "prompt_len",
        help_heading = "Load"
    )]
    pub output_len: Option<LenRange>,
    /// Makes the lengths of --prompt-len and --output-len
    #[arg(long, value_name = "SEED", default_value_t = 0, help_heading = "Load")]
    pub seed: u64,
    /// Requests [default: all of the trace, else 300]
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub num_requests: Option<usize>,
    /// Requests a second, at even intervals [default: as the trace has them, else all at once]
    #[arg(long, value_name = "X", help_heading = "Load")]
    pub request_rate: Option<f64>,
    /// All requests of the trace at once
    #[arg(long, conflicts_with = "request_rate", help_heading = "Load")]
    pub at_once: bool,

    /// Rules to compare
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        value_parser = parse_rule,
        default_values = RULES.iter().map(|rule| rule.name)
    )]
    pub rules: Vec<&'static Rule>,
    /// Tokens of the pool
    #[arg(long, value_name = "TOKENS", help_heading = "Scheduler")]
    pub kv_cache_tokens: u32,
    /// Tokens in a KV page
    #[arg(
        long,
        value_name = "TOKENS",
        visible_alias = "page-size",
        default_value_t = 16,
        help_heading = "Scheduler"
    )]
    pub block_size: u32,
    /// Share the KV of preempted requests with themselves; no two prompts have anything in common
    #[arg(long, help_heading = "Scheduler")]
    pub prefix_caching: bool,
    /// Longest prompt and output together
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 131_072,
        help_heading = "Scheduler"
    )]
    pub max_model_len: u32,
    /// Requests that run at once
    #[arg(
        long,
        value_name = "N",
        default_value_t = 512,
        help_heading = "Scheduler"
    )]
    pub max_num_seqs: u32,
    /// Tokens of a step
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8192,
        help_heading = "Scheduler"
    )]
    pub max_num_batched_tokens: u32,
    /// Prompt tokens of a step [default: --max-num-batched-tokens]
    #[arg(long, value_name = "N", help_heading = "Scheduler")]
    pub max_prefill_tokens: Option<u32>,
    /// Time of a step, in microseconds
    #[arg(
        long,
        value_name = "US",
        default_value_t = 20_000.0,
        help_heading = "Cost"
    )]
    pub step_us: f64,
    /// Time of a token in a step
    #[arg(long, value_name = "US", default_value_t = 50.0, help_heading = "Cost")]
    pub token_us: f64,
    /// Time of a thousand pairs of a token and one before it that it attends to
    #[arg(long, value_name = "US", default_value_t = 0.5, help_heading = "Cost")]
    pub attended_kilotoken_us: f64,
    /// Write the numbers as JSON
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
}

fn parse_rule(text: &str) -> Result<&'static Rule, String> {
    Rule::named(text).ok_or_else(|| {
        let names: Vec<_> = RULES.iter().map(|rule| rule.name).collect();
        format!("must be one of {}", names.join(", "))
    })
}
