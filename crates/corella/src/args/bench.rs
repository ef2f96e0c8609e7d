//! What was typed after `corella bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use corella_bench::scheduler::SchedulerBenchOptions;
use corella_bench::serve::{BenchServeOptions, COMMON_VOCAB_SIZE};
use corella_bench::{Metric, Objective};

use super::admission::BenchAdmissionArgs;
use super::{CacheArgs, DeviceArgs, KvFormatArg, ModelArgs, SchedulerArgs, SpeculationArgs};

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Load a running server; report latencies and throughput
    Serve(BenchServeArgs),
    /// Load an engine in this process, without HTTP and text
    Offline(BenchOfflineArgs),
    /// What a step costs the scheduler, and a token the prefix cache
    Scheduler(BenchSchedulerArgs),
    /// What this machine can do at best, and how much of it each kernel gets
    Kernels(BenchKernelsArgs),
    /// How well a model predicts a text, in which the cost of rounding its weights shows
    Perplexity(BenchPerplexityArgs),
    /// Replay the prefixes of a request trace through the prefix cache
    Cache(BenchCacheArgs),
    /// Compare rules of what a request reserves at admission, in virtual time
    ///
    /// The scheduler is the real one; a step takes what --step-us, --token-us and
    /// --attended-kilotoken-us make of it, and every request ends by itself at the length that the
    /// trace says.
    ///
    /// oracle-reserve knows every length and reserves all of it; oracle knows it as max_tokens, in
    /// the default configuration; sglang reserves a share that sinks from 0.7 to 0.1 in 600 steps of
    /// a max_tokens of 4,096, since its own clipping of longer limits cannot be expressed; vllm
    /// reserves nothing (but after a preemption the rest of the true length, since nothing cannot be
    /// expressed then); default is what a client gets that gives no max_tokens.
    ///
    /// Ratios are to the better of the two oracles; `by pages` is the share of time in which
    /// requests waited with slots and tokens left.
    Admission(BenchAdmissionArgs),
}

#[derive(Args)]
pub struct BenchServeArgs {
    /// The server, with or without /v1
    #[arg(long, value_name = "URL", default_value_t = bench_defaults().base_url)]
    pub base_url: String,
    /// The model to ask for [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Sent as a bearer token
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// Which API to use
    #[arg(long, value_enum, default_value_t)]
    pub endpoint: EndpointArg,

    /// A file of prompts, one a line; lines of a .jsonl file are objects with a `prompt`, which
    /// is text or a list of token ids
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Load")]
    pub prompts: Option<PathBuf>,
    /// Prompts of this many English words, every one different [default: 128]
    #[arg(long, value_name = "N", group = "source", help_heading = "Load")]
    pub prompt_words: Option<usize>,
    /// Prompts of this many random token ids, for which there is nothing to tokenise
    #[arg(
        long,
        value_name = "N",
        visible_alias = "random-input-len",
        group = "source",
        help_heading = "Load"
    )]
    pub prompt_tokens: Option<usize>,
    /// Words or tokens in front of the random ones, the same in all prompts
    #[arg(
        long,
        value_name = "N",
        visible_alias = "random-prefix-len",
        default_value_t = 0,
        conflicts_with_all = ["prompts", "prompt_repeats", "trace"],
        help_heading = "Load"
    )]
    pub prefix_len: usize,
    /// How many such beginnings there are; prompts have them in turn
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "prefix_len",
        help_heading = "Load"
    )]
    pub num_prefixes: usize,
    /// With --prompt-tokens: no two prompts begin with the same token, so that the prefix cache
    /// has no part of any
    #[arg(
        long,
        requires = "prompt_tokens",
        conflicts_with = "prefix_len",
        help_heading = "Load"
    )]
    pub unique_prompts: bool,
    /// With --prompt-tokens: ids are below this
    #[arg(
        long,
        value_name = "N",
        default_value_t = COMMON_VOCAB_SIZE,
        requires = "prompt_tokens",
        help_heading = "Load"
    )]
    pub vocab_size: u32,
    /// Prompts of a phrase repeated this often, in turn, e.g. 5,50,500
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        group = "source",
        help_heading = "Load"
    )]
    pub prompt_repeats: Vec<usize>,
    /// What --prompt-repeats repeats [default: "hello "]
    #[arg(
        long,
        value_name = "TEXT",
        requires = "prompt_repeats",
        help_heading = "Load"
    )]
    pub prompt_phrase: Option<String>,
    /// A trace: JSON lines with timestamp, input_length, output_length and hash_ids
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Load")]
    pub trace: Option<PathBuf>,
    /// Factor for the times of --trace
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "trace",
        help_heading = "Load"
    )]
    pub time_scale: f64,
    /// Factor for the lengths of --trace
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "trace",
        help_heading = "Load"
    )]
    pub length_scale: f64,
    /// Requests a second, on average [default: as many as --max-concurrency allows]
    #[arg(
        long,
        value_name = "X",
        conflicts_with = "trace",
        help_heading = "Load"
    )]
    pub request_rate: Option<f64>,
    /// With --request-rate: 1 for random arrivals, less for bursts, more for even ones
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "request_rate",
        help_heading = "Load"
    )]
    pub burstiness: f64,
    /// Ask the server's /tokenize for the tokens of all prompts before the run, and send those
    #[arg(long, help_heading = "Load")]
    pub pre_tokenize: bool,
    /// Milliseconds from one request to the next
    #[arg(
        long,
        value_name = "MS",
        value_parser = parse_milliseconds,
        conflicts_with_all = ["trace", "request_rate"],
        help_heading = "Load"
    )]
    pub submit_interval: Option<Duration>,
    /// Requests to send
    #[arg(
        long,
        value_name = "N",
        default_value_t = bench_defaults().num_prompts,
        help_heading = "Load"
    )]
    pub num_prompts: usize,
    /// Requests running at any time [default: all at once]
    #[arg(
        long,
        value_name = "N",
        visible_alias = "concurrency",
        help_heading = "Load"
    )]
    pub max_concurrency: Option<usize>,
    /// Most tokens of each answer
    #[arg(
        long,
        value_name = "N",
        default_value_t = bench_defaults().max_tokens,
        help_heading = "Load"
    )]
    pub max_tokens: u32,
    /// Go on after an end token, so that every answer has --max-tokens
    #[arg(long, help_heading = "Load")]
    pub ignore_eos: bool,
    /// 0 takes the most likely token
    #[arg(
        long,
        value_name = "X",
        default_value_t = bench_defaults().temperature,
        help_heading = "Load"
    )]
    pub temperature: f32,
    /// Makes the random prompts, and is sent with every request
    #[arg(
        long,
        value_name = "SEED",
        default_value_t = bench_defaults().seed,
        help_heading = "Load"
    )]
    pub seed: u64,
    /// Requests sent before the first run and not measured
    #[arg(
        long,
        value_name = "N",
        default_value_t = bench_defaults().num_warmups,
        help_heading = "Load"
    )]
    pub num_warmups: usize,
    /// Runs, one after the other, with other random prompts in each; reports give medians and
    /// spread
    #[arg(
        long,
        value_name = "N",
        default_value_t = bench_defaults().num_repeats,
        help_heading = "Load"
    )]
    pub repeats: usize,

    #[command(flatten)]
    pub report: ReportArgs,
    /// Count the requests that keep these limits in milliseconds, e.g. ttft:500,tpot:50
    #[arg(long, value_name = "NAME:MS,…", value_delimiter = ',', value_parser = parse_objective, help_heading = "Report")]
    pub goodput: Vec<Objective>,
}

#[derive(Args)]
pub struct BenchKernelsArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Args)]
pub struct BenchPerplexityArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to predict. Lines of a .jsonl file are documents, objects with a `text`; any other file
    /// is one
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens that are looked at together; longer documents are cut
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: u32,
    /// Type of K and V; auto is bf16 for 16-bit weights and f32 for f32
    #[arg(long, value_enum, default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Args)]
pub struct BenchOfflineArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Requests, submitted all at once and in order
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Load")]
    pub num_prompts: usize,
    /// Tokens of the prompts, in turn; 900-915 stands for all numbers between
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = parse_range, default_value = "128", help_heading = "Load")]
    pub input_lens: Vec<LenRange>,
    /// Make every prompt the beginning of one text
    #[arg(long, help_heading = "Load")]
    pub shared_prefix: bool,
    /// New tokens of every request
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = "Load")]
    pub max_tokens: u32,
    /// Makes the prompts
    #[arg(long, value_name = "SEED", default_value_t = 0, help_heading = "Load")]
    pub seed: u64,
    /// Say where the time of the steps went, beside what the machine could do
    #[arg(long, help_heading = "Load")]
    pub profile: bool,
    /// With --device mock: time of a step, in microseconds
    #[arg(long, value_name = "US", help_heading = "Device")]
    pub mock_step_us: Option<f64>,
    /// With --device mock: time of a token in a step, in microseconds
    #[arg(long, value_name = "US", help_heading = "Device")]
    pub mock_token_us: Option<f64>,
    #[command(flatten)]
    pub scheduler: SchedulerArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Report")]
pub struct ReportArgs {
    /// Write the results as JSON with the keys of `vllm bench`
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    /// Add the numbers of every request to the JSON
    #[arg(long, requires = "output_json")]
    pub save_detailed: bool,
    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Lengths from the first to the last, both included.
#[derive(Clone, Copy, Debug)]
pub struct LenRange(pub usize, pub usize);

#[derive(Args)]
pub struct BenchSchedulerArgs {
    /// Requests that decode
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_running)]
    pub num_running: Vec<usize>,
    /// Requests that wait
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_waiting)]
    pub num_waiting: Vec<usize>,
    /// Steps timed for each pair of them
    #[arg(long, value_name = "N", default_value_t = SchedulerBenchOptions::default().num_steps)]
    pub num_steps: usize,
    /// Requests that wait where many do, beside 1,024 that run
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().queue.num_waiting)]
    pub num_queued: Vec<usize>,
    /// Calls timed for a row of those, in 3 seconds at most
    #[arg(long, value_name = "N", default_value_t = SchedulerBenchOptions::default().queue.limits.num_calls)]
    pub num_calls: usize,
    /// Tokens of the one prompt in the prefix cache
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_tokens)]
    pub num_tokens: Vec<usize>,
    /// Pages of a full prefix cache
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_cached_pages)]
    pub num_cached_pages: Vec<usize>,
    /// Write the numbers as JSON
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
}

#[derive(Args)]
pub struct BenchCacheArgs {
    /// JSON lines with `hash_ids`, as the Mooncake traces have them
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Sizes of the pool in blocks; 0 holds everything
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    pub num_blocks: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EndpointArg {
    #[default]
    Completions,
    Chat,
}

fn bench_defaults() -> BenchServeOptions {
    BenchServeOptions::default()
}

fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse::<f64>().map(|ms| ms / 1e3);
    let duration = seconds.ok().map(Duration::try_from_secs_f64);
    match duration {
        Some(Ok(duration)) if !duration.is_zero() => Ok(duration),
        _ => Err("must be a number above 0".to_owned()),
    }
}

fn parse_objective(text: &str) -> Result<Objective, String> {
    let metric = |name: &str| match name {
        "ttft" => Some(Metric::Ttft),
        "tpot" => Some(Metric::Tpot),
        "e2el" => Some(Metric::E2el),
        _ => None,
    };
    let objective = text.split_once(':').and_then(|(name, limit)| {
        Some(Objective {
            metric: metric(name)?,
            limit_ms: limit.parse().ok().filter(|limit| *limit > 0.0)?,
        })
    });
    objective.ok_or_else(|| "must be ttft, tpot or e2el, a colon and milliseconds".to_owned())
}

pub(super) fn parse_range(text: &str) -> Result<LenRange, String> {
    let number = |text: &str| {
        let number = text.trim().parse::<usize>();
        number.map_err(|_| format!("`{text}` is not a number"))
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = LenRange(number(first)?, number(last)?);
    match range {
        LenRange(1.., _) if range.0 <= range.1 => Ok(range),
        _ => Err("must be at least 1, and a range must not go down".to_owned()),
    }
}
