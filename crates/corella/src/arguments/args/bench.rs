//! The command line of `corella bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use corella_bench::scheduler::SchedulerBenchOptions;
use corella_bench::serve::{BenchServeOptions, COMMON_VOCAB_SIZE};
use corella_bench::transfer::TransferBenchOptions;
use corella_bench::{Metric, Objective};

use super::admission::BenchAdmissionArgs;
use super::{DeviceArgs, EngineArgs, KvFormatArg, ModelArgs};

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Load a running server and report latencies and throughput
    Serve(BenchServeArgs),
    /// Load an engine in this process, without HTTP or text
    Offline(Box<BenchOfflineArgs>),
    /// Compare the results of two runs, which --output-json or `vllm bench serve --save-result` wrote
    Compare(BenchCompareArgs),
    /// Measure the scheduler and the prefix cache by themselves
    Scheduler(BenchSchedulerArgs),
    /// Measure the limits of this machine, and the share of them that each kernel reaches
    Kernels(BenchKernelsArgs),
    /// Measure how well a model predicts a text, to see what quantisation costs
    Perplexity(BenchPerplexityArgs),
    /// How fast KV rows go from one node to another, beside a bare socket and memory
    ///
    /// Sender and receiver are in this process. All ways copy the same pages to the same pages over
    /// as many connections; tcp and shm with their checksums, credits and sessions of a message each,
    /// socket and memcpy with nothing but the bytes.
    Transfer(BenchTransferArgs),
    /// Replay the prefixes of a request trace through the prefix cache
    Cache(BenchCacheArgs),
    /// Compare rules for the KV pages that a request reserves when it starts, in virtual time
    ///
    /// The scheduler is the real one. The time of a step is computed from --step-us, --token-us and
    /// --attended-kilotoken-us, and every request ends at the length that the trace gives it.
    ///
    /// The rules: oracle-reserve knows the length of each output and reserves all of it. oracle gets
    /// that length as max_tokens and is configured as by default. sglang gets a max_tokens of 4,096,
    /// or more for longer outputs, and reserves a share of it that sinks from 0.7 to 0.1 within 600
    /// steps; SGLang's clipping of longer limits is not modelled. vllm reserves nothing when a
    /// request starts, and the rest of the true length after a preemption. default gets no
    /// max_tokens.
    ///
    /// Ratios compare with the better of the two oracles. `by pages` is the share of the time in
    /// which requests waited for pages although slots and tokens were free.
    Admission(BenchAdmissionArgs),
}

#[derive(Args)]
pub struct BenchServeArgs {
    /// URL of the server, with or without /v1. https:// checks its certificate; SSL_CERT_FILE names the
    /// file of an authority of your own [default: http://127.0.0.1:8000]
    #[arg(long, value_name = "URL")]
    pub base_url: Option<String>,
    /// Host of the server, in place of --base-url
    #[arg(long, value_name = "HOST", conflicts_with = "base_url")]
    pub host: Option<String>,
    /// Port of the server, in place of --base-url [default: 8000]
    #[arg(long, value_name = "PORT", conflicts_with = "base_url")]
    pub port: Option<u16>,
    /// Model to request [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// API key to send as a bearer token [default: that in OPENAI_API_KEY]
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// API endpoint to load
    #[arg(long, value_enum, default_value_t)]
    pub endpoint: EndpointArg,

    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Count the requests that stay within these limits in milliseconds, e.g. ttft:500,tpot:50
    #[arg(long, value_name = "NAME:MS,…", num_args = 1.., value_delimiter = ',', value_parser = parse_objective, help_heading = "Report")]
    pub goodput: Vec<Objective>,
    /// Report these percentiles of each time, beside the median, p95 and p99, e.g. 90,99.9
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_percent, help_heading = "Report")]
    pub metric_percentiles: Vec<f64>,
}

#[derive(Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// File with one prompt per line. A line of a .jsonl file is an object with a `prompt`, which is
    /// a text or a list of token ids
    #[arg(long, value_name = "FILE", group = "source")]
    pub prompts: Option<PathBuf>,
    /// Make random prompts of this many English words [default: 128]
    #[arg(long, value_name = "N", group = "source")]
    pub prompt_words: Option<usize>,
    /// Make prompts of this many random token ids, which the server need not tokenise
    #[arg(
        long,
        value_name = "N",
        visible_alias = "random-input-len",
        group = "source"
    )]
    pub prompt_tokens: Option<usize>,
    /// Put a shared prefix of this many words or tokens before each random prompt
    #[arg(
        long,
        value_name = "N",
        visible_alias = "random-prefix-len",
        default_value_t = 0,
        conflicts_with_all = ["prompts", "prompt_repeats", "trace"]
    )]
    pub prefix_len: usize,
    /// Number of different shared prefixes, which the prompts use in turn
    #[arg(long, value_name = "N", default_value_t = 1, requires = "prefix_len")]
    pub num_prefixes: usize,
    /// With --prompt-tokens: let every prompt begin with another token, so that the prefix cache
    /// cannot help
    #[arg(long, requires = "prompt_tokens", conflicts_with = "prefix_len")]
    pub unique_prompts: bool,
    /// With --prompt-tokens: draw token ids below this number
    #[arg(long, value_name = "N", default_value_t = COMMON_VOCAB_SIZE, requires = "prompt_tokens")]
    pub vocab_size: u32,
    /// Make prompts that repeat a phrase this many times; with several numbers, in turn, e.g.
    /// 5,50,500
    #[arg(long, value_name = "N,…", value_delimiter = ',', group = "source")]
    pub prompt_repeats: Vec<usize>,
    /// The phrase that --prompt-repeats repeats [default: "hello "]
    #[arg(long, value_name = "TEXT", requires = "prompt_repeats")]
    pub prompt_phrase: Option<String>,
    /// Replay a trace: JSON lines with timestamp, input_length, output_length and hash_ids
    #[arg(long, value_name = "FILE", group = "source")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub scale: TraceScaleArgs,
    /// Send this many requests per second on average; inf is the default [default: as many as
    /// --max-concurrency allows]
    #[arg(long, value_name = "X", conflicts_with = "trace")]
    pub request_rate: Option<f64>,
    /// With --request-rate: how requests arrive. 1 is at random, less is in bursts, more is evenly
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        requires = "request_rate"
    )]
    pub burstiness: f64,
    /// Tokenise all prompts by the server's /tokenize before the run, and send token ids
    #[arg(long)]
    pub pre_tokenize: bool,
    /// Send a request every MS milliseconds; 0 sends all at once
    #[arg(long, value_name = "MS", value_parser = parse_milliseconds, conflicts_with_all = ["trace", "request_rate"])]
    pub submit_interval: Option<Duration>,
    /// Number of requests to send
    #[arg(long, value_name = "N", default_value_t = bench_defaults().num_prompts)]
    pub num_prompts: usize,
    /// Maximum number of requests in flight [default: all]
    #[arg(long, value_name = "N", visible_alias = "concurrency")]
    pub max_concurrency: Option<usize>,
    /// Maximum number of tokens to generate for each request
    #[arg(long, value_name = "N", default_value_t = bench_defaults().max_tokens)]
    pub max_tokens: u32,
    /// Continue after an end token, so that every answer has --max-tokens tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Sampling temperature; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value_t = bench_defaults().temperature)]
    pub temperature: f32,
    /// Seed of the random prompts, which is also sent with every request
    #[arg(long, value_name = "SEED", default_value_t = bench_defaults().seed)]
    pub seed: u64,
    /// Number of requests to send before the first run, which are not measured
    #[arg(long, value_name = "N", default_value_t = bench_defaults().num_warmups)]
    pub num_warmups: usize,
    /// Number of runs, each with other random prompts; with more than one, the median and the spread
    /// are reported
    #[arg(long, value_name = "N", default_value_t = bench_defaults().num_repeats)]
    pub repeats: usize,
}

#[derive(Args)]
pub struct BenchCompareArgs {
    /// Results to compare with
    #[arg(value_name = "A.json")]
    pub first: PathBuf,
    /// Results whose ratios to the first are shown
    #[arg(value_name = "B.json")]
    pub second: PathBuf,
    /// Write an HTML page about both. It has plots if the files were written with --save-detailed
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
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
    /// The text to predict. Each line of a .jsonl file is a document, an object with a `text`; any
    /// other file is one document
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Maximum number of tokens to process together; longer documents are cut into parts
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: u32,
    /// Type of keys and values; auto is f32 for f32 weights, else bf16
    #[arg(long, value_enum, default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Args)]
pub struct BenchOfflineArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub load: OfflineLoadArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Load")]
pub struct OfflineLoadArgs {
    /// Number of requests, which are submitted all at once and in order
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub num_prompts: usize,
    /// Lengths of the prompts in tokens, in turn; 900-915 stands for the 16 lengths from 900 to 915
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = parse_range, default_value = "128")]
    pub input_lens: Vec<LenRange>,
    /// Let every prompt be a prefix of the same text
    #[arg(long)]
    pub shared_prefix: bool,
    /// Number of tokens to generate for each request
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub max_tokens: u32,
    /// Seed of the random prompts
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Show the time that each operation took, beside the machine's limits
    #[arg(long)]
    pub profile: bool,
    /// Also reserve pages every MS milliseconds, as a decode node does for another node's prompt, give
    /// them up, and show how long the answers took
    #[arg(long, value_name = "MS")]
    pub reserve_every: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "Report")]
pub struct ReportArgs {
    /// Write the results as JSON with the keys of `vllm bench`
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    /// Add the measurements of every request to the JSON
    #[arg(long, requires = "output_json")]
    pub save_detailed: bool,
    /// Write an HTML page with plots
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// How a trace is made longer or denser than it was recorded.
#[derive(Args)]
#[command(next_help_heading = "Load")]
pub struct TraceScaleArgs {
    /// Multiply the times of --trace by this factor
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace")]
    pub time_scale: f64,
    /// Multiply the lengths of --trace by this factor
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace")]
    pub length_scale: f64,
}

/// Where the results go of a benchmark that has no report.
#[derive(Args)]
pub struct JsonArgs {
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
}

/// Lengths from the first to the last, both included.
#[derive(Clone, Copy, Debug)]
pub struct LenRange(pub usize, pub usize);

#[derive(Args)]
pub struct BenchSchedulerArgs {
    /// Numbers of decoding requests to measure steps with
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_running)]
    pub num_running: Vec<usize>,
    /// Numbers of waiting requests to measure steps with
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_waiting)]
    pub num_waiting: Vec<usize>,
    /// Steps to time for each combination of --num-running and --num-waiting
    #[arg(long, value_name = "N", default_value_t = SchedulerBenchOptions::default().num_steps)]
    pub num_steps: usize,
    /// Lengths of long queues to measure single calls with, while 1,024 requests run
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().queue.num_waiting)]
    pub num_queued: Vec<usize>,
    /// Calls to time for each row of the table of long queues, in at most 3 seconds
    #[arg(long, value_name = "N", default_value_t = SchedulerBenchOptions::default().queue.limits.num_calls)]
    pub num_calls: usize,
    /// Lengths of a single prompt in the prefix cache, in tokens
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_tokens)]
    pub num_tokens: Vec<usize>,
    /// Sizes of a full prefix cache, in pages
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = SchedulerBenchOptions::default().num_cached_pages)]
    pub num_cached_pages: Vec<usize>,
    #[command(flatten)]
    pub json: JsonArgs,
}

#[derive(Args)]
pub struct BenchTransferArgs {
    /// Kilobytes (1,024 bytes) of a session
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = kilobytes(TransferBenchOptions::default().message_bytes))]
    pub message_kb: Vec<usize>,
    /// Kilobytes of a page within a layer
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = kilobytes(TransferBenchOptions::default().page_bytes))]
    pub page_kb: Vec<usize>,
    /// Connections, each with a thread at either end
    #[arg(long, value_name = "N", default_value_t = TransferBenchOptions::default().num_connections)]
    pub connections: usize,
    /// Measurements of each pair of sizes, by turns; the table has medians
    #[arg(long, value_name = "N", default_value_t = TransferBenchOptions::default().num_repeats)]
    pub repeats: usize,
    /// Megabytes of one measurement
    #[arg(long, value_name = "N", default_value_t = TransferBenchOptions::default().bytes_per_repeat >> 20)]
    pub repeat_mb: usize,
    /// Kilobytes of a session before another has its turn
    #[arg(long, value_name = "N", default_value_t = TransferBenchOptions::default().chunk_bytes >> 10)]
    pub chunk_kb: usize,
    /// Write the numbers as JSON
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
}

fn kilobytes(sizes: Vec<usize>) -> Vec<usize> {
    sizes.into_iter().map(|bytes| bytes >> 10).collect()
}

#[derive(Args)]
pub struct BenchCacheArgs {
    /// Trace to replay: JSON lines with `hash_ids`, as in the Mooncake traces
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Sizes of the cache, in blocks of the trace; 0 is unlimited
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    pub num_blocks: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EndpointArg {
    #[default]
    #[value(alias = "/v1/completions")]
    Completions,
    #[value(alias = "/v1/chat/completions")]
    Chat,
}

fn bench_defaults() -> BenchServeOptions {
    BenchServeOptions::default()
}

fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse::<f64>().map(|ms| ms / 1e3);
    let duration = seconds.ok().map(Duration::try_from_secs_f64);
    match duration {
        Some(Ok(duration)) => Ok(duration),
        _ => Err("must be a number of at least 0".to_owned()),
    }
}

fn parse_percent(text: &str) -> Result<f64, &'static str> {
    let percent = text.trim().parse().ok();
    let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or("must be a number from 0 to 100")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_may_be_0() {
        assert_eq!(parse_milliseconds("0"), Ok(Duration::ZERO));
        assert_eq!(parse_milliseconds("2.5"), Ok(Duration::from_micros(2500)));
        for text in ["-1", "NaN", "soon"] {
            assert!(parse_milliseconds(text).is_err(), "{text}");
        }
    }
}
