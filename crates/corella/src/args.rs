//! What was typed. `config.rs` says what is meant by it.

mod admission;
mod bench;
mod quantize;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use corella::LlmOptions;
use corella_core::{HeadRoom, SchedulerConfig};

pub use admission::BenchAdmissionArgs;
pub use bench::{
    BenchCacheArgs, BenchCommand, BenchKernelsArgs, BenchOfflineArgs, BenchPerplexityArgs,
    BenchSchedulerArgs, BenchServeArgs, EndpointArg, LenRange, ReportArgs,
};
pub use quantize::{GroupLen, MethodArg, QuantizeArgs, QuantizeFormatArg};

/// Serves large language models.
#[derive(Parser)]
#[command(
    name = "corella",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Serve a model over an OpenAI-compatible API
    Serve(ServeArgs),
    /// Write a model's answer to standard output, and its speed to standard error
    Generate(GenerateArgs),
    /// Write a model as a folder with integer weights
    Quantize(QuantizeArgs),
    /// Measure
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Name of the model in the API; may be given more than once [default: the folder's or file's
    /// name]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub served_model_name: Vec<String>,
    /// Address or host name to listen on; 0.0.0.0 for all addresses of this machine
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub host: String,
    /// Port to listen on; 0 for any
    #[arg(long, default_value_t = 8000, help_heading = "Server")]
    pub port: u16,
    /// Ask every API request for this bearer token
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true,
        help_heading = "Server"
    )]
    pub api_key: Option<String>,
    /// Seed of requests that name none [default: another each time]
    #[arg(long, value_name = "SEED", help_heading = "Server")]
    pub seed: Option<u64>,
    /// Ignore request fields that no API is known to have, which are answered with 400 otherwise
    #[arg(long, help_heading = "Server")]
    pub allow_unknown_fields: bool,
    /// A step that takes longer ends the server, for its supervisor to start it again; 0 for never
    #[arg(long, value_name = "SECONDS", default_value_t = LlmOptions::default().step_deadline.as_secs(), help_heading = "Server")]
    pub step_deadline: u64,

    #[command(flatten)]
    pub scheduler: SchedulerArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// What to say to the model
    #[arg(
        short,
        long,
        value_name = "TEXT",
        required_unless_present = "prompt_tokens"
    )]
    pub prompt: Option<String>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// A made-up prompt of this many tokens, to measure with
    #[arg(long, value_name = "N", conflicts_with = "prompt")]
    pub prompt_tokens: Option<usize>,
    /// Most tokens to generate [default: what the context allows]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Go on after an end token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Do not measure the machine's limits to compare with
    #[arg(long)]
    pub no_limits: bool,
    /// Say where the time of the steps went, beside what the machine could do
    #[arg(long, conflicts_with = "no_limits")]
    pub profile: bool,

    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors) or GGUF file [default: the
    /// built-in model]
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Another way to give MODEL
    #[arg(
        short = 'm',
        long = "model",
        value_name = "MODEL",
        conflicts_with = "model"
    )]
    pub model_option: Option<PathBuf>,
    /// Longest prompt and output together [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// Type of the weights; auto keeps the checkpoint's, and of integers of more than 4 bits 8
    #[arg(long, value_enum, default_value_t)]
    pub dtype: WeightFormatArg,
    /// Where a server keeps weights that it has rounded or repacked for the next start [default:
    /// ~/.cache/corella]
    #[arg(long, value_name = "FOLDER")]
    pub weight_cache: Option<PathBuf>,
    /// Disk space for them, of all models together; those not used for the longest time make room.
    /// 0 keeps and reads none
    #[arg(long, value_name = "SIZE", value_parser = parse_size_or_zero, default_value = "32G")]
    pub weight_cache_size: u64,
}

#[derive(Args)]
#[command(next_help_heading = "Scheduler")]
pub struct SchedulerArgs {
    /// Requests that hold KV cache at once
    #[arg(long, value_name = "N", default_value_t = defaults().max_num_seqs)]
    pub max_num_seqs: u32,
    /// Tokens of one step, prefill and decode together
    #[arg(long, value_name = "TOKENS", default_value_t = defaults().max_num_batched_tokens)]
    pub max_num_batched_tokens: u32,
    /// Prefill tokens of one step, all requests together [default: the step's]
    #[arg(long, value_name = "TOKENS", visible_alias = "chunked-prefill-size")]
    pub max_prefill_tokens: Option<u32>,
    /// One request's share of a step's prefill while others want some; 0 for no bound
    #[arg(long, value_name = "TOKENS", default_value_t = defaults().long_prefill_token_threshold)]
    pub long_prefill_token_threshold: u32,
    /// Requests that prefill in one step [default: no bound]
    #[arg(long, value_name = "N")]
    pub max_prefill_seqs: Option<u32>,
    /// Requests that decode in one step, in turn [default: no bound]
    #[arg(long, value_name = "N")]
    pub max_decode_seqs: Option<u32>,
    /// Requests that may wait; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = defaults().max_queued_requests)]
    pub max_queued_requests: u32,
    /// Prompt tokens that may wait; more are answered with 429
    #[arg(long, value_name = "TOKENS", default_value_t = defaults().max_queued_tokens)]
    pub max_queued_tokens: u64,
    /// Answer requests with 429 that can no longer meet the ttft_slo_ms or tpot_slo_ms in them
    #[arg(long)]
    pub slo_admission: bool,
    /// KV pages that a request finds kept for its output when it starts: `estimate` goes by how
    /// long outputs have been lately; `limit` keeps all that it may come to need, and nothing is
    /// ever preempted; a number from 0 to 1 keeps that share
    #[arg(long, value_name = "estimate|limit|SHARE", value_parser = parse_head_room, default_value = "estimate")]
    pub head_room: HeadRoom,
    /// Compute every prompt in one step
    #[arg(long)]
    pub no_chunked_prefill: bool,
    /// Whose turn it is: the first to arrive, the most urgent, or the longest cached prefix
    #[arg(long, value_enum, default_value_t)]
    pub scheduling_policy: SchedulingPolicyArg,
    /// Which waiting requests join a step: the first ones, or the smallest that fit
    #[arg(long, value_enum, default_value_t)]
    pub prefill_admission_policy: AdmissionPolicyArg,
    /// Waiting requests that pack and lpm look at
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prefill_admission_lookahead: u32,
    /// With pack, every Nth round is first come, first served; 0 for never
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill_force_fifo_every: u32,
    /// A request overtaken in this many steps is owed the next turn
    #[arg(long, value_name = "N", default_value_t = defaults().max_passed_over)]
    pub max_passed_over: u32,
    /// Steps planned before the first of them has returned, at most 16
    #[arg(long, value_name = "N", default_value_t = defaults().max_inflight_steps)]
    pub max_inflight_steps: u32,
    /// Stages that the layers are split over, each with its share of the threads and working on
    /// another step
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_parallel_size: u32,
}

#[derive(Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationArgs {
    /// Guess the tokens to come and check them in the step of the one before, with what it has
    /// left: ngram goes by what followed the newest tokens earlier in prompt and answer, draft by a
    /// smaller model. Answers stay the same; those that repeat a text, or that a much smaller model
    /// can foresee, may come sooner
    #[arg(long, value_enum, default_value_t)]
    pub speculate: SpeculateArg,
    /// With --speculate draft: folder or GGUF file of a model with the same tokens, small beside
    /// the model served
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Type of the draft model's weights [default: as its checkpoint has them]
    #[arg(long, value_enum)]
    pub draft_dtype: Option<WeightFormatArg>,
    /// With --speculate: guesses of one request in one step, at most; fewer while they fail
    #[arg(long, value_name = "N", value_parser = parse_draft_tokens)]
    pub draft_tokens: Option<u32>,
}

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Memory for the KV cache, e.g. 512M or 4G [default: half of what is free, and no more
    /// than the requests can use]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Tokens in a KV page
    #[arg(long, value_name = "TOKENS", visible_alias = "page-size", default_value_t = defaults().page_size)]
    pub block_size: u32,
    /// Type of K and V; auto is bf16 for 16-bit weights and f32 for f32. int8 halves what a token
    /// takes of bf16
    #[arg(long, value_enum, visible_alias = "kv-dtype", default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    /// Share the KV of common prompt beginnings (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt from its first token
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Keep the KV of this beginning of prompts for good, as the model sees it: of a conversation
    /// with the chat template's marks. @FILE reads it from a file; may be given more than once.
    /// Only whole pages are kept
    #[arg(long, value_name = "TEXT", conflicts_with = "no_enable_prefix_caching")]
    pub pin_prefix: Vec<String>,
    /// Share of the KV pages that pinned prefixes may take
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.25")]
    pub max_pinned_share: f64,
}

#[derive(Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute; mock computes nothing and answers at once, for tests and benches
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceArg,
    /// CPU threads; more than there are cores only wait for each other [default: the cores that
    /// this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Keep each thread on a core of its own, and its weights in the memory next to it; of use
    /// where nothing else runs
    #[arg(long)]
    pub pin_threads: bool,
    /// CPU instructions; avx512-bf16 and amx round what goes into dense layers of bf16 weights to
    /// bf16
    /// [default: the best of this machine]
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
}

#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the most likely token [default: the model's]
    #[arg(long, value_name = "X")]
    pub temperature: Option<f32>,
    /// Draw from the K most likely tokens; 0 for all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Draw from the smallest set with this probability [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Draw from tokens at least this likely relative to the most likely one
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Equal seeds give equal answers [default: an arbitrary one]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Portable,
    Avx2,
    Avx512,
    Avx512Bf16,
    Amx,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvFormatArg {
    #[default]
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(alias = "float16", alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    Int8,
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
    /// Rounded at load, one scale an output; what they meet is rounded as well
    Int8,
    /// As int8, one scale for each 128 weights of an output: nearer to bf16, longer prefill
    Int8Grouped,
    /// 4 bits, one scale for each 128 weights of an output; what they meet is rounded to 8 bits
    Int4,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    #[default]
    Auto,
    Cpu,
    Mock,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicyArg {
    #[default]
    Fcfs,
    Priority,
    Lpm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AdmissionPolicyArg {
    #[default]
    Fifo,
    Pack,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SpeculateArg {
    #[default]
    Off,
    Ngram,
    Draft,
}

fn defaults() -> SchedulerConfig {
    LlmOptions::default().scheduler
}

/// In units of 1/65536, as the scheduler counts.
fn parse_share(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

fn parse_head_room(text: &str) -> Result<HeadRoom, String> {
    match (text, text.parse::<f64>()) {
        ("estimate", _) => Ok(HeadRoom::Estimate),
        ("limit", _) => Ok(HeadRoom::Limit),
        (_, Ok(share)) if (0.0..=1.0).contains(&share) => {
            let share = share * f64::from(HeadRoom::ONE);
            Ok(HeadRoom::fixed_share(share as u32))
        }
        _ => Err("must be `estimate`, `limit` or a number from 0 to 1".to_owned()),
    }
}

fn parse_draft_tokens(text: &str) -> Result<u32, String> {
    let most = SchedulerConfig::MAX_DRAFT_TOKENS;
    match text.trim().parse::<u32>() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(format!("must be a number from 1 to {most}")),
    }
}

fn parse_size_or_zero(text: &str) -> Result<u64, String> {
    match text.trim() {
        "0" => Ok(0),
        text => parse_size(text),
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KB" | "KIB" => 1 << 10,
        "M" | "MB" | "MIB" => 1 << 20,
        "G" | "GB" | "GIB" => 1 << 30,
        "T" | "TB" | "TIB" => 1 << 40,
        unit => return Err(format!("unknown unit `{unit}`; use K, M, G or T")),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{digits}` is not a number"))?;
    if !(number > 0.0 && number * unit as f64 <= u64::MAX as f64) {
        return Err("must be more than 0".to_owned());
    }
    Ok((number * unit as f64) as u64)
}
