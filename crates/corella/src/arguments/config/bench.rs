//! The configuration of benchmarks, from their arguments.

use std::sync::Arc;
use std::time::Duration;

use corella_bench::ReportFiles;
use corella_bench::offline::OfflineOptions;
use corella_bench::serve::{BenchServeOptions, Endpoint, PromptSource, RandomPrompts, Unit};
use corella_cpu::{Isa, num_cores};

use super::{
    documents, kv_format, options_of, set_cache, set_device, set_model, set_scheduler,
    set_speculation, source,
};
use crate::arguments::args::{
    BenchKernelsArgs, BenchOfflineArgs, BenchPerplexityArgs, BenchServeArgs, EndpointArg, LenRange,
    ReportArgs,
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
    let prompts = match (args.prompts, args.trace) {
        (Some(file), _) => PromptSource::File(file),
        (_, Some(file)) => PromptSource::Trace {
            file,
            time_scale: args.scale.time_scale,
            length_scale: args.scale.length_scale,
        },
        _ if !args.prompt_repeats.is_empty() => PromptSource::Repeats {
            phrase: args.prompt_phrase.unwrap_or_else(|| "hello ".to_owned()),
            repeats: args.prompt_repeats,
        },
        _ => PromptSource::Random(RandomPrompts {
            unit: match args.prompt_tokens {
                None => Unit::Words,
                Some(_) => Unit::Tokens {
                    vocab_size: args.vocab_size,
                    unique: args.unique_prompts,
                },
            },
            len: args
                .prompt_tokens
                .or(args.prompt_words)
                .unwrap_or(RandomPrompts::default().len),
            prefix_len: args.prefix_len,
            num_prefixes: args.num_prefixes,
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
        pre_tokenize: args.pre_tokenize,
        num_prompts: args.num_prompts,
        request_rate: args.request_rate.filter(|rate| *rate != f64::INFINITY),
        burstiness: args.burstiness,
        submit_interval: args.submit_interval,
        max_concurrency: args.max_concurrency,
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        seed: args.seed,
        temperature: args.temperature,
        api_key: args.api_key.or_else(openai_key),
        num_warmups: args.num_warmups,
        num_repeats: args.repeats,
        files: report_files(args.report),
        goodput: args.goodput,
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
    set_device(&mut options, &args.device)?;
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
    set_model(&mut options, &args.model)?;
    set_device(&mut options, &args.device)?;
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
        source: source(args.model),
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
    let mut options = options_of(&args.device, &args.speculation);
    set_model(&mut options, &args.model)?;
    set_scheduler(&mut options, &args.scheduler);
    set_speculation(&mut options, &args.speculation)?;
    set_cache(&mut options, &args.cache)?;
    set_device(&mut options, &args.device)?;
    if args.profile && options.device == Device::Mock {
        let reason = "--profile needs --device cpu: the mock computes nothing";
        return Err(Error::Config(reason.to_owned()));
    }
    options.profile = args.profile.then(Arc::default);
    let lens = args.input_lens.iter();
    Ok(BenchOffline {
        source: source(args.model),
        options,
        load: OfflineOptions {
            num_prompts: args.num_prompts,
            input_lens: lens
                .flat_map(|&LenRange(first, last)| first..=last)
                .collect(),
            shared_prefix: args.shared_prefix,
            max_tokens: args.max_tokens,
            seed: args.seed,
            files: report_files(args.report),
        },
        reserve_every: args.reserve_every.map(Duration::from_millis),
    })
}

fn report_files(args: ReportArgs) -> ReportFiles {
    ReportFiles {
        json: args.output_json,
        is_detailed: args.save_detailed,
        html: args.report,
    }
}
