//! The configuration of benchmarks, from their arguments.

use std::sync::Arc;
use std::time::Duration;

use corella_bench::ReportFiles;
use corella_bench::offline::OfflineOptions;
use corella_bench::serve::{BenchServeOptions, Endpoint, PromptSource, RandomPrompts, Unit};
use corella_cpu::{Isa, num_cores};

use super::documents;
use crate::arguments::args::{
    BenchKernelsArgs, BenchOfflineArgs, BenchPerplexityArgs, BenchServeArgs, EndpointArg, LenRange,
    ReportArgs, kv_format,
};
use crate::client::tls_client::client_tls;
use crate::{Device, Error, LlmOptions, ModelSource};

pub fn bench_serve(args: BenchServeArgs) -> Result<BenchServeOptions, Error> {
    let base_url = args.base_url.unwrap_or_else(|| {
        // An IPv6 address has colons of its own.
        let host = match args.host.as_deref().unwrap_or("127.0.0.1") {
            host if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
            host => host.to_owned(),
        };
        format!("http://{host}:{}", args.port.unwrap_or(8000))
    });
    let tls = match base_url.starts_with("https://") {
        true => Some(client_tls().map_err(Error::Config)?),
        false => None,
    };
    let load = args.load;
    let prompts = match (load.prompts, load.trace) {
        (Some(file), _) => PromptSource::File(file),
        (_, Some(file)) => PromptSource::Trace {
            file,
            time_scale: load.scale.time_scale,
            length_scale: load.scale.length_scale,
        },
        _ if !load.prompt_repeats.is_empty() => PromptSource::Repeats {
            phrase: load.prompt_phrase.unwrap_or_else(|| "hello ".to_owned()),
            repeats: load.prompt_repeats,
        },
        _ => PromptSource::Random(RandomPrompts {
            unit: match load.prompt_tokens {
                None => Unit::Words,
                Some(_) => Unit::Tokens {
                    vocab_size: load.vocab_size,
                    unique: load.unique_prompts,
                },
            },
            len: load
                .prompt_tokens
                .or(load.prompt_words)
                .unwrap_or(RandomPrompts::default().len),
            prefix_len: load.prefix_len,
            num_prefixes: load.num_prefixes,
        }),
    };
    Ok(BenchServeOptions {
        base_url,
        tls,
        model: args.model,
        endpoint: match args.endpoint {
            EndpointArg::Completions => Endpoint::Completions,
            EndpointArg::Chat => Endpoint::Chat,
        },
        prompts,
        pre_tokenize: load.pre_tokenize,
        num_prompts: load.num_prompts,
        request_rate: load.request_rate.filter(|rate| *rate != f64::INFINITY),
        burstiness: load.burstiness,
        submit_interval: load.submit_interval,
        max_concurrency: load.max_concurrency,
        max_tokens: load.max_tokens,
        ignore_eos: load.ignore_eos,
        seed: load.seed,
        temperature: load.temperature,
        api_key: args.api_key.or_else(openai_key),
        num_warmups: load.num_warmups,
        num_repeats: load.repeats,
        files: report_files(args.report),
        goodput: args.goodput,
        percentiles: args.metric_percentiles,
        ..BenchServeOptions::default()
    })
}

/// The key that `vllm bench serve` and OpenAI's clients send.
fn openai_key() -> Option<String> {
    let key = std::env::var("OPENAI_API_KEY").ok();
    key.filter(|key| !key.is_empty())
}

/// Returns the number of threads and the instruction set to measure.
pub fn bench_kernels(args: &BenchKernelsArgs) -> Result<(usize, Option<Isa>), Error> {
    let mut options = LlmOptions::default();
    args.device.set(&mut options)?;
    if !matches!(options.device, Device::Auto | Device::Cpu) {
        return Err(Error::Config(
            "only a CPU has kernels to measure".to_owned(),
        ));
    }
    Ok((options.num_threads.unwrap_or_else(num_cores), options.isa))
}

pub struct BenchPerplexity {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub documents: Vec<String>,
    pub context: u32,
}

pub fn bench_perplexity(args: BenchPerplexityArgs) -> Result<BenchPerplexity, Error> {
    let mut options = LlmOptions::default();
    args.model.set(&mut options)?;
    args.device.set(&mut options)?;
    options.kv_format = kv_format(args.kv_cache_dtype)?;
    if args.context < 2 {
        let reason = "--context must be at least 2: one token to read and one to predict";
        return Err(Error::Config(reason.to_owned()));
    }
    if args.model.max_model_len.is_some() {
        let reason = "--max-model-len has no effect here; use --context, the number of tokens to process \
                      together";
        return Err(Error::Config(reason.to_owned()));
    }
    let documents = documents(&args.text)?;
    Ok(BenchPerplexity {
        source: args.model.source(),
        options,
        documents,
        context: args.context,
    })
}

pub struct BenchOffline {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub load: OfflineOptions,
    /// The time between reservations, if any.
    pub reserve_every: Option<Duration>,
}

pub fn bench_offline(args: BenchOfflineArgs) -> Result<BenchOffline, Error> {
    let mut options = args.engine.options(&args.model)?;
    let load = args.load;
    if load.profile && options.device == Device::Mock {
        let reason = "--profile needs --device cpu: the mock computes nothing";
        return Err(Error::Config(reason.to_owned()));
    }
    options.profile = load.profile.then(Arc::default);
    let lens = load.input_lens.iter();
    Ok(BenchOffline {
        source: args.model.source(),
        options,
        load: OfflineOptions {
            num_prompts: load.num_prompts,
            input_lens: lens
                .flat_map(|&LenRange(first, last)| first..=last)
                .collect(),
            shared_prefix: load.shared_prefix,
            max_tokens: load.max_tokens,
            seed: load.seed,
            files: report_files(args.report),
        },
        reserve_every: load.reserve_every.map(Duration::from_millis),
    })
}

fn report_files(args: ReportArgs) -> ReportFiles {
    ReportFiles {
        json: args.output_json,
        is_detailed: args.save_detailed,
        html: args.report,
    }
}
