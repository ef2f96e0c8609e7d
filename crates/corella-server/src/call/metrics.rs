//! The metrics of `/metrics`, under Corella's and vLLM's names.

mod call_timer;
mod engine;
mod http;
mod metric_sum;
mod output;
mod process;
mod rendering;
mod step_token_histogram;
mod text_format;

pub use self::call_timer::{CallTimer, ChoiceTimes};
pub use self::http::HttpMetrics;
pub use self::metric_sum::MetricSum;
pub use self::output::OutputMetrics;
pub use self::text_format::prefers_open_metrics;

use std::fmt;

use corella_core::SchedulerConfig;
use corella_engine::Engine;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};

use crate::config::serve_config::ServeConfig;
use crate::wire::cache_explanation::MissCause;

use self::engine::EngineMetrics;

/// Metrics of a model's requests, as clients see them. The engine's counts are read at each scrape.
pub struct Metrics {
    registry: Registry,
    pub outputs: OutputMetrics,
    prompt_tokens: Counter,
    /// By the cause.
    prefix_cache_misses: [Counter; MissCause::ALL.len()],
    tokenize_seconds: Histogram,
    queue_seconds: Histogram,
    prefill_seconds: Histogram,
    inference_seconds: Histogram,
    request_prompt_tokens: Histogram,
    request_max_num_generation_tokens: Histogram,
    request_params_n: Histogram,
    request_params_max_tokens: Histogram,
    time_to_first_token: Histogram,
    latency: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MissLabels {
    cause: &'static str,
}

/// All causes start at zero, so that a rate has its first increase.
fn no_misses(misses: &Family<MissLabels, Counter>) -> [Counter; MissCause::ALL.len()] {
    std::array::from_fn(|at| {
        let cause = MissCause::ALL[at].name();
        Counter::clone(&misses.get_or_create(&MissLabels { cause }))
    })
}

/// Bounds for times up to the first token, which are short on a fast machine.
const FIRST_TOKEN_BUCKETS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
];
/// Bounds for counts of tokens, as in vLLM.
const LENGTH_BUCKETS: [f64; 17] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
];
/// Bounds for counts of choices, as in vLLM.
const NUM_CHOICES_BUCKETS: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
const REQUEST_BUCKETS: [f64; 16] = [
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
];

impl Metrics {
    /// `collectors` add metrics of parts unknown to the server.
    // Long: one registration for each metric.
    pub fn new(
        config: &ServeConfig,
        engine: &Engine,
        outputs: OutputMetrics,
        collectors: Vec<Box<dyn Collector>>,
    ) -> Self {
        let label = ("model_name".into(), config.model_name().to_owned().into());
        let mut registry = Registry::with_labels([label].into_iter());
        let cache_config =
            || Info::new(cache_labels(engine.limits(), &config.model_facts.kv_format));
        for name in ["corella_cache_config", "vllm:cache_config"] {
            let help = "The KV cache: block_size is the tokens of a page, num_gpu_blocks the pages in any memory";
            registry.register(name, help, cache_config());
        }
        registry.register_collector(Box::new(EngineMetrics(engine.clone())));
        for collector in collectors {
            registry.register_collector(collector);
        }
        let mut names = Names(&mut registry);
        outputs.register(&mut names);
        Self {
            outputs,
            prompt_tokens: names.both(
                "prompt_tokens",
                "Prompt tokens of requests that have a first output token",
                Counter::default(),
            ),
            prefix_cache_misses: no_misses(&names.ours(
                "prefix_cache_misses",
                "Prompt tokens that were computed because the prefix cache lacked them, by cause; once for all choices of a prompt",
                Family::default(),
            )),
            queue_seconds: names.both(
                "request_queue_time_seconds",
                "Time from submission to first scheduling",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            prefill_seconds: names.both(
                "request_prefill_time_seconds",
                "Time from first scheduling to the first token",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            inference_seconds: names.both(
                "request_inference_time_seconds",
                "Time from first scheduling to the last token of a choice",
                Histogram::new(REQUEST_BUCKETS),
            ),
            request_prompt_tokens: names.both(
                "request_prompt_tokens",
                "Prompt tokens of a choice",
                Histogram::new(LENGTH_BUCKETS),
            ),
            request_max_num_generation_tokens: names.both(
                "request_max_num_generation_tokens",
                "Generated tokens of a call's longest choice",
                Histogram::new(LENGTH_BUCKETS),
            ),
            request_params_n: names.both(
                "request_params_n",
                "Choices of a call that ended by itself, for each of its prompts",
                Histogram::new(NUM_CHOICES_BUCKETS),
            ),
            request_params_max_tokens: names.both(
                "request_params_max_tokens",
                "The limit of output tokens of a call that ended by itself and had one",
                Histogram::new(LENGTH_BUCKETS),
            ),
            tokenize_seconds: names.ours(
                "request_tokenize_time_seconds",
                "Time from a request's arrival to its submission: reading, checking, tokenising",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            time_to_first_token: names.both(
                "time_to_first_token_seconds",
                "Time from a request's arrival to its first token",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            latency: names.both(
                "e2e_request_latency_seconds",
                "Time from a request's arrival to its last token",
                Histogram::new(REQUEST_BUCKETS),
            ),
            registry,
        }
    }

    pub fn encode(&self, text: &mut String) -> fmt::Result {
        encode_registry(text, &self.registry)
    }
}

/// Returns the labels of vLLM's `cache_config_info` that dashboards read. Switches are written like Python's booleans.
fn cache_labels(limits: &SchedulerConfig, kv_format: &str) -> Vec<(&'static str, String)> {
    let switch = match limits.enable_prefix_caching {
        true => "True",
        false => "False",
    };
    vec![
        ("block_size", limits.page_size.to_string()),
        ("num_gpu_blocks", limits.num_pages.to_string()),
        ("cache_dtype", kv_format.to_owned()),
        ("enable_prefix_caching", switch.to_owned()),
    ]
}

/// Registers metrics by their names.
struct Names<'a>(&'a mut Registry);

impl Names<'_> {
    /// Registers one metric as `corella_NAME`.
    fn ours<M: Metric + Clone>(&mut self, name: &str, help: &'static str, metric: M) -> M {
        self.0
            .register(format!("corella_{name}"), help, metric.clone());
        metric
    }

    /// Registers one metric as `corella_NAME` and `vllm:NAME`.
    fn both<M: Metric + Clone>(&mut self, name: &str, help: &'static str, metric: M) -> M {
        self.0
            .register(format!("vllm:{name}"), help, metric.clone());
        self.ours(name, help, metric)
    }
}
