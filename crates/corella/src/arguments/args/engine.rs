//! Options of the engine: its scheduler, speculation, KV cache, device and sampling.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use corella_core::{HeadRoom, SchedulerConfig};

use super::MockTimeArgs;
use super::byte_size::{parse_size, parse_size_or_zero};
use super::token_count::{ChunkSize, parse_chunk_size, parse_count, parse_large_count};
use crate::LlmOptions;

#[derive(Args)]
#[command(next_help_heading = "Scheduler")]
pub struct SchedulerArgs {
    /// Maximum number of requests that run at once, each with a part of the KV cache
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = defaults().max_num_seqs)]
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step, prefill and decode together [default: 512, or more for more than 256
    /// requests at once; with --device cuda, 2048]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub max_num_batched_tokens: Option<u32>,
    /// Maximum number of prefill tokens in one step, all requests together [default: --chunked-prefill-size, but
    /// at most --max-num-batched-tokens]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub max_prefill_tokens: Option<u32>,
    /// Maximum number of prefill tokens of one request in one step; -1 computes every prompt whole, as
    /// --no-chunked-prefill does [default: --max-prefill-tokens]
    #[arg(long, value_name = "TOKENS", value_parser = parse_chunk_size, allow_negative_numbers = true)]
    pub chunked_prefill_size: Option<ChunkSize>,
    /// Maximum number of prefill tokens of one request in a step while other requests have a prompt to
    /// read; 0 disables the limit
    #[arg(long, value_name = "TOKENS", value_parser = parse_count, default_value_t = defaults().long_prefill_token_threshold)]
    pub long_prefill_token_threshold: u32,
    /// Maximum number of requests that prefill in one step [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_prefill_seqs: Option<u32>,
    /// Maximum number of requests that decode in one step; if more are running they take turns
    /// [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_decode_seqs: Option<u32>,
    /// Maximum number of waiting requests; further ones get 429
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = defaults().max_queued_requests)]
    pub max_queued_requests: u32,
    /// Maximum number of waiting prompt tokens, all requests together; further requests get 429
    #[arg(long, value_name = "TOKENS", value_parser = parse_large_count, default_value_t = defaults().max_queued_tokens)]
    pub max_queued_tokens: u64,
    /// Answer a request with 429 as soon as it can no longer meet its own ttft_slo_ms or
    /// tpot_slo_ms
    #[arg(long)]
    pub slo_admission: bool,
    /// KV pages to keep free for the outputs of running requests: `estimate` expects outputs to be
    /// as long as recent ones were; `limit` keeps enough for the longest possible output, so that
    /// no request is preempted for lack of pages; a number from 0 to 1 keeps enough for that share
    /// of the longest possible output
    #[arg(long, value_name = "estimate|limit|SHARE", value_parser = parse_head_room, default_value = "estimate")]
    pub head_room: HeadRoom,
    /// Compute every prompt whole, in one step
    #[arg(long)]
    pub no_chunked_prefill: bool,
    /// Which waiting request starts next: the first to arrive (fcfs), the most urgent (priority), the
    /// one with the longest cached prefix (lpm), or the one with the least work left (sjf)
    #[arg(long, value_enum, default_value_t)]
    pub scheduling_policy: SchedulingPolicyArg,
    /// Which waiting requests join a step: the first ones (fifo), or the smallest that fit (pack)
    #[arg(long, value_enum, default_value_t)]
    pub prefill_admission_policy: AdmissionPolicyArg,
    /// Number of waiting requests that pack, lpm and sjf choose from
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prefill_admission_lookahead: u32,
    /// With pack: serve every Nth round in order of arrival; 0 disables this
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill_force_fifo_every: u32,
    /// Start a waiting request next once others have overtaken it in this many steps
    #[arg(long, value_name = "N", default_value_t = defaults().max_passed_over)]
    pub max_passed_over: u32,
    /// Maximum number of steps in flight, up to 16 [default: 1; with --device cuda and without
    /// --speculate, 2]
    #[arg(long, value_name = "N")]
    pub max_inflight_steps: Option<u32>,
    /// Number of pipeline stages; each has its share of the layers and threads, and they work on
    /// different steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_parallel_size: u32,
}

#[derive(Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationArgs {
    /// Guess the next tokens of each request, and check the guesses in a step that has room for
    /// them. ngram guesses what followed the newest tokens earlier in the prompt or the answer;
    /// draft asks a smaller model, and mtp the model's own head for multi-token prediction. Answers stay the
    /// same, and come sooner when guesses hold
    #[arg(long, value_enum, default_value_t)]
    pub speculate: SpeculateArg,
    /// With --speculate draft: folder, GGUF file or name of the draft model, which must have the same
    /// vocabulary and should be much smaller
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Type of the draft model's weights [default: auto]
    #[arg(long, value_enum)]
    pub draft_dtype: Option<WeightFormatArg>,
    /// With --speculate: maximum number of guesses for one request in one step; fewer are made while
    /// they fail
    #[arg(long, value_name = "N", value_parser = parse_draft_tokens)]
    pub draft_tokens: Option<u32>,
}

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Memory for the KV cache, e.g. 512M or 4G [default: half of the free memory, or less if the
    /// requests cannot use that much]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Memory in which preempted requests keep their keys and values, instead of computing them
    /// again when they resume [default: 0; a quarter of the KV cache on a node that may decode for
    /// others: with --role decode, --registry or --cluster-listen]
    #[arg(long, value_name = "SIZE", value_parser = parse_size_or_zero)]
    pub kv_spill_memory: Option<u64>,
    #[command(flatten)]
    pub page: PageArgs,
    /// Type of keys and values. auto is f32 for f32 weights, else bf16; int8 takes about half the
    /// memory of bf16
    #[arg(long, value_enum, visible_alias = "kv-dtype", default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    /// Share the KV pages of prompts that begin alike (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt from its first token, and share no KV pages
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Compute this prefix at start and never evict its KV pages. It is the text that the model
    /// sees, including the marks of the chat template; @FILE reads it from a file. Repeat the
    /// option for more prefixes. Only whole pages are kept
    #[arg(long, value_name = "TEXT", conflicts_with = "no_enable_prefix_caching")]
    pub pin_prefix: Vec<String>,
    /// Largest share of the KV pages that pinned prefixes may take, from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.25")]
    pub max_pinned_share: f64,
}

#[derive(Args)]
pub struct PageArgs {
    /// Tokens of a KV page
    #[arg(long, value_name = "TOKENS", visible_alias = "page-size", default_value_t = defaults().page_size)]
    pub block_size: u32,
}

#[derive(Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: auto is an NVIDIA GPU if there is one that computes the model, else the CPU; cuda is the
    /// GPU; mock computes nothing and answers with made-up tokens, for tests and benchmarks
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceArg,
    /// With --device cuda: leave large products to cuBLASLt, with which the bits of an answer may
    /// depend on the requests beside it
    #[arg(long)]
    pub no_batch_invariance: bool,
    /// With --device cuda: the share of the GPU's memory, from 0 to 1, that weights, activations and KV cache take
    /// together, unless --kv-cache-memory says what the KV cache takes
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.9")]
    pub gpu_memory_utilization: f64,
    /// Number of CPU threads; more threads than cores are slower [default: the number of cores that
    /// this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Pin each thread to a core, with its weights in that core's NUMA node; useful if nothing else
    /// runs on the machine
    #[arg(long)]
    pub pin_threads: bool,
    /// CPU instruction set [default: the best that this machine has]. With avx512-bf16 and amx, the
    /// inputs of layers with bf16 weights are rounded to bf16
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
    #[command(flatten)]
    pub mock_time: MockTimeArgs,
    /// What the mock answers, word for word; of several texts, the seed of a request chooses
    #[arg(long, value_name = "TEXT", hide = true)]
    pub mock_dictation: Vec<String>,
    /// A file of what the mock answers to prompts that have a text: [[TEXT, ANSWER], …]; the text that ends last in
    /// the prompt counts
    #[arg(
        long,
        value_name = "FILE",
        hide = true,
        conflicts_with = "mock_dictation"
    )]
    pub mock_script: Option<PathBuf>,
}

#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token [default: the model's]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Draw from the K most likely tokens; 0 draws from all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Draw from the most likely tokens that together have this probability [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Draw from tokens that are at least P times as likely as the most likely one [default: the
    /// model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Seed of the random draws; the same seed gives the same answer [default: a different one each
    /// time]
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
    /// Floats of 8 bits, which other servers have. They are refused with advice.
    #[value(hide = true, alias = "fp8_e4m3", alias = "fp8_e5m2", alias = "fp8_inc")]
    Fp8,
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
    /// 8-bit integers, one scale per output channel; inputs of these layers are rounded to 8 bits
    /// too
    Int8,
    /// 8-bit integers, one scale per group of 128 weights: more accurate than int8, slower prefill
    Int8Grouped,
    /// 4-bit integers, one scale per group of 128 weights; inputs of these layers are rounded to 8
    /// bits
    Int4,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    #[default]
    Auto,
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    Mock,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicyArg {
    #[default]
    Fcfs,
    Priority,
    Lpm,
    Sjf,
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
    Mtp,
}

pub fn defaults() -> SchedulerConfig {
    LlmOptions::default().scheduler
}

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
