//! The metrics of `/metrics`, under Corella's and vLLM's names.

mod call_timer;
mod kv_disk;
mod output;
mod process;
mod rendering;
mod step_token_histogram;
mod text_format;

pub use self::call_timer::{CallTimer, ChoiceTimes};
pub use self::kv_disk::KvDiskMetrics;
pub use self::output::OutputMetrics;
pub use self::text_format::prefers_open_metrics;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use corella_core::{SchedulerConfig, Speculation};
use corella_engine::{Engine, EngineStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};

use crate::config::serve_config::ServeConfig;
use crate::text::text_thread::TextWork;

use self::process::ProcessMetrics;
use self::rendering::Renderer;
use self::step_token_histogram::StepTokenHistogram;

/// Metrics of requests, as clients see them. The engine's counts are read at each scrape.
pub struct Metrics {
    registry: Registry,
    /// Metrics of the process, without a model label.
    process: Registry,
    pub renderer: Renderer,
    engine: EngineMetrics,
    text_work_waiting: Gauge,
    text_work_oldest: Gauge<f64, AtomicU64>,
    http_requests: Family<HttpLabels, Counter>,
    pub outputs: OutputMetrics,
    prompt_tokens: Counter,
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
struct HttpLabels {
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PositionLabels {
    position: usize,
}

/// Times up to the first token, which are short on a fast machine.
const FIRST_TOKEN_BUCKETS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
];
/// Numbers of tokens, in vLLM's steps.
const LENGTH_BUCKETS: [f64; 17] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
];
/// Numbers of choices, in vLLM's steps.
const NUM_CHOICES_BUCKETS: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
const REQUEST_BUCKETS: [f64; 16] = [
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
];

impl Metrics {
    /// `collectors` add metrics of parts unknown to the server.
    pub fn new(
        config: &ServeConfig,
        limits: &SchedulerConfig,
        outputs: OutputMetrics,
        collectors: Vec<Box<dyn Collector>>,
    ) -> Self {
        let label = ("model_name".into(), config.model_name().to_owned().into());
        let mut registry = Registry::with_labels([label].into_iter());
        let mut process = Registry::default();
        process.register_collector(Box::new(ProcessMetrics));
        let cache_config = || Info::new(cache_labels(limits, &config.model_facts.kv_format));
        for name in ["corella_cache_config", "vllm:cache_config"] {
            let help = "The KV cache; blocks are its pages, wherever they are";
            registry.register(name, help, cache_config());
        }
        for collector in collectors {
            registry.register_collector(collector);
        }
        let http_requests = Family::default();
        registry.register(
            "corella_http_requests",
            "HTTP requests by path and status; 499 is a client that left early",
            http_requests.clone(),
        );
        outputs.register(&mut registry);
        Self {
            outputs,
            engine: EngineMetrics::new(&mut registry, limits),
            text_work_waiting: ours(
                &mut registry,
                "text_work_waiting",
                "Bodies that wait for a text thread, which reads, renders and tokenises them",
                Gauge::default(),
            ),
            text_work_oldest: ours(
                &mut registry,
                "text_work_oldest_seconds",
                "How long the oldest body that a text thread works on has been worked on",
                Gauge::default(),
            ),
            http_requests,
            prompt_tokens: both(
                &mut registry,
                "prompt_tokens",
                "Prompt tokens of requests that have a first output token",
                Counter::default(),
            ),
            queue_seconds: both(
                &mut registry,
                "request_queue_time_seconds",
                "Time from submission to first scheduling",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            prefill_seconds: both(
                &mut registry,
                "request_prefill_time_seconds",
                "Time from first scheduling to the first token",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            inference_seconds: both(
                &mut registry,
                "request_inference_time_seconds",
                "Time from first scheduling to the last token of a choice",
                Histogram::new(REQUEST_BUCKETS),
            ),
            request_prompt_tokens: both(
                &mut registry,
                "request_prompt_tokens",
                "Prompt tokens of a choice",
                Histogram::new(LENGTH_BUCKETS),
            ),
            request_max_num_generation_tokens: both(
                &mut registry,
                "request_max_num_generation_tokens",
                "Generated tokens of a call's longest choice",
                Histogram::new(LENGTH_BUCKETS),
            ),
            request_params_n: both(
                &mut registry,
                "request_params_n",
                "Choices that a call asked for, for each of its prompts",
                Histogram::new(NUM_CHOICES_BUCKETS),
            ),
            request_params_max_tokens: both(
                &mut registry,
                "request_params_max_tokens",
                "The limit of output tokens of a call with one",
                Histogram::new(LENGTH_BUCKETS),
            ),
            tokenize_seconds: {
                let metric = Histogram::new(FIRST_TOKEN_BUCKETS);
                registry.register(
                    "corella_request_tokenize_time_seconds",
                    "Time from a request's arrival to its submission: reading, checking, tokenising",
                    metric.clone(),
                );
                metric
            },
            time_to_first_token: both(
                &mut registry,
                "time_to_first_token_seconds",
                "Time from a request's arrival to its first token",
                Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            latency: both(
                &mut registry,
                "e2e_request_latency_seconds",
                "Time from a request's arrival to its last token",
                Histogram::new(REQUEST_BUCKETS),
            ),
            process,
            renderer: Renderer::new(Duration::ZERO),
            registry,
        }
    }

    pub fn handle_response(&self, path: &str, status: u16) {
        let path = path.to_owned();
        self.http_requests
            .get_or_create(&HttpLabels { path, status })
            .inc();
    }

    /// Encodes all metrics as OpenMetrics text, which Prometheus prefers and older scrapers can read.
    pub fn encode(&self, engine: &Engine, text_work: TextWork) -> Result<String, fmt::Error> {
        self.engine.update(&engine.stats());
        self.text_work_waiting.set(text_work.num_waiting as i64);
        self.text_work_oldest.set(text_work.oldest.as_secs_f64());
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &self.process)?;
        encode_eof(&mut text)?;
        Ok(text)
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

/// Registers one metric as `corella_NAME`.
fn ours<M: Metric + Clone>(
    registry: &mut Registry,
    name: &str,
    help: &'static str,
    metric: M,
) -> M {
    registry.register(format!("corella_{name}"), help, metric.clone());
    metric
}

/// Registers one metric as `corella_NAME` and `vllm:NAME`.
fn both<M: Metric + Clone>(
    registry: &mut Registry,
    name: &str,
    help: &'static str,
    metric: M,
) -> M {
    registry.register(format!("vllm:{name}"), help, metric.clone());
    ours(registry, name, help, metric)
}

/// Copies of the engine's own counts, updated at each scrape.
struct EngineMetrics {
    num_requests_running: Gauge,
    num_requests_waiting: Gauge,
    kv_cache_usage: Gauge<f64, AtomicU64>,
    num_cached_pages: Gauge,
    num_in_use_pages: Gauge,
    num_pinned_pages: Gauge,
    num_held_pages: Gauge,
    num_requests_receiving: Gauge,
    num_spilled_pages: Gauge,
    num_snapshots: Gauge,
    max_passed_over: Gauge,
    prefix_cache_queries: Counter,
    prefix_cache_hits: Counter,
    /// Tokens found in the prefix cache, by source.
    prefix_cache_hit_tokens: Family<SourceLabels, Counter>,
    num_preemptions: Counter,
    num_spills: Counter,
    num_restores: Counter,
    num_handed_back: Counter,
    num_drafts: Counter,
    num_draft_tokens: Counter,
    num_accepted_draft_tokens: Counter,
    /// One counter for each draft token that a request may have in a step.
    accepted_by_position: Vec<Counter>,
    num_missed_objectives: Counter,
    num_evicted_pages: Counter,
    num_steps: Counter,
    step_tokens: StepTokenHistogram,
    num_failed_steps: Counter,
    num_slow_steps: Counter,
    step_seconds: Counter<f64, AtomicU64>,
}

impl EngineMetrics {
    fn new(registry: &mut Registry, limits: &SchedulerConfig) -> Self {
        let accepted_by_position = both(
            registry,
            "spec_decode_num_accepted_tokens_per_pos",
            "Generated tokens that had been drafted, by their place among the draft tokens",
            Family::<PositionLabels, Counter>::default(),
        );
        let num_positions = match limits.speculation {
            // Its name is printed like those of the other counters.
            Speculation::Off => 1,
            _ => limits.max_draft_tokens as usize,
        };
        let accepted_by_position = (0..num_positions)
            .map(|position| PositionLabels { position })
            .map(|labels| accepted_by_position.get_or_create_owned(&labels))
            .collect();
        let num_evicted_pages = ours(
            registry,
            "kv_pages_evicted",
            "Cached KV pages that were evicted",
            Counter::default(),
        );
        let num_steps = ours(registry, "steps", "Batches run", Counter::default());
        let num_failed_steps = ours(
            registry,
            "failed_steps",
            "Steps that failed",
            Counter::default(),
        );
        let num_slow_steps = ours(
            registry,
            "slow_steps",
            "Steps that took longer than 30 seconds",
            Counter::default(),
        );
        let step_seconds = ours(
            registry,
            "step_seconds",
            "Time spent in steps",
            Counter::default(),
        );
        let num_cached_pages = ours(
            registry,
            "kv_pages_cached",
            "KV pages in the prefix cache that no running request holds",
            Gauge::default(),
        );
        let num_in_use_pages = ours(
            registry,
            "kv_pages_in_use",
            "KV pages that running requests hold",
            Gauge::default(),
        );
        let num_held_pages = ours(
            registry,
            "kv_pages_held",
            "KV pages that other nodes may still read or write after their request has ended here",
            Gauge::default(),
        );
        let num_requests_receiving = ours(
            registry,
            "num_requests_receiving",
            "Requests whose prompt another node computes",
            Gauge::default(),
        );
        let num_spilled_pages = ours(
            registry,
            "kv_spilled_pages",
            "KV pages of preempted requests in host memory",
            Gauge::default(),
        );
        let num_spills = ours(
            registry,
            "kv_spills",
            "Preempted requests whose KV went to host memory",
            Counter::default(),
        );
        let num_restores = ours(
            registry,
            "kv_restores",
            "Requests that got their KV back from host memory",
            Counter::default(),
        );
        let num_handed_back = ours(
            registry,
            "requests_handed_back",
            "Requests of other nodes that were preempted and whose KV could not be kept",
            Counter::default(),
        );
        let num_snapshots = ours(
            registry,
            "state_snapshots",
            "Copies of recurrent state that requests with the same prefix go on from",
            Gauge::default(),
        );
        let num_pinned_pages = ours(
            registry,
            "kv_pages_pinned",
            "KV pages of pinned prefixes, which are never evicted",
            Gauge::default(),
        );
        let max_passed_over = ours(
            registry,
            "max_passed_over",
            "Most steps in which others overtook one waiting request",
            Gauge::default(),
        );
        let num_missed_objectives = ours(
            registry,
            "requests_too_late",
            "Requests that were refused or ended because they could not meet their latency objectives",
            Counter::default(),
        );
        let prefix_cache_hit_tokens = Family::default();
        registry.register(
            "corella_prefix_cache_hit_tokens",
            "Tokens not computed, by source: pages of earlier steps, rows copied, pages of the \
             same step, whatever a preempted request found again",
            prefix_cache_hit_tokens.clone(),
        );
        Self {
            prefix_cache_hit_tokens,
            accepted_by_position,
            num_pinned_pages,
            max_passed_over,
            num_evicted_pages,
            num_steps,
            num_failed_steps,
            num_slow_steps,
            step_seconds,
            num_cached_pages,
            num_in_use_pages,
            num_held_pages,
            num_requests_receiving,
            num_spilled_pages,
            num_snapshots,
            num_spills,
            num_restores,
            num_handed_back,
            num_requests_running: both(
                registry,
                "num_requests_running",
                "Requests that are running",
                Gauge::default(),
            ),
            num_requests_waiting: both(
                registry,
                "num_requests_waiting",
                "Requests that wait to start, to resume after a preemption, or to decode with the KV of another node",
                Gauge::default(),
            ),
            kv_cache_usage: both(
                registry,
                "kv_cache_usage_perc",
                "Share of the KV pages that running requests hold, from 0 to 1",
                Gauge::default(),
            ),
            prefix_cache_queries: both(
                registry,
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache",
                Counter::default(),
            ),
            prefix_cache_hits: both(
                registry,
                "prefix_cache_hits",
                "Tokens found in the prefix cache",
                Counter::default(),
            ),
            num_preemptions: both(
                registry,
                "num_preemptions",
                "Preemptions of running requests",
                Counter::default(),
            ),
            step_tokens: both(
                registry,
                "iteration_tokens_total",
                "Tokens of a step",
                StepTokenHistogram::default(),
            ),
            num_drafts: both(
                registry,
                "spec_decode_num_drafts",
                "Times at which a request had draft tokens in a step",
                Counter::default(),
            ),
            num_draft_tokens: both(
                registry,
                "spec_decode_num_draft_tokens",
                "Draft tokens that were checked",
                Counter::default(),
            ),
            num_accepted_draft_tokens: both(
                registry,
                "spec_decode_num_accepted_tokens",
                "Generated tokens that had been drafted, and took no step of their own",
                Counter::default(),
            ),
            num_missed_objectives,
        }
    }

    fn update(&self, stats: &EngineStats) {
        let scheduler = &stats.scheduler;
        self.num_requests_running.set(scheduler.num_running as i64);
        // A request whose KV has arrived waits for a slot like any other.
        let num_waiting = scheduler.num_waiting + scheduler.num_arrived;
        self.num_requests_waiting.set(num_waiting as i64);
        self.num_cached_pages.set(scheduler.num_cached_pages as i64);
        self.num_in_use_pages.set(scheduler.num_in_use_pages as i64);
        self.num_pinned_pages.set(scheduler.num_pinned_pages as i64);
        self.num_held_pages.set(scheduler.num_held_pages as i64);
        self.num_requests_receiving
            .set(scheduler.num_receiving as i64);
        self.num_snapshots.set(scheduler.num_snapshots as i64);
        self.num_spilled_pages
            .set(scheduler.num_spilled_pages as i64);
        self.max_passed_over.set(scheduler.max_passed_over.into());
        let num_pages = scheduler.num_pages.max(1) as f64;
        self.kv_cache_usage
            .set(scheduler.num_in_use_pages as f64 / num_pages);
        let copies = [
            (
                &self.prefix_cache_queries,
                scheduler.num_prefix_query_tokens,
            ),
            (&self.prefix_cache_hits, scheduler.num_prefix_hit_tokens),
            (&self.num_preemptions, scheduler.num_preemptions),
            (&self.num_spills, scheduler.num_spills),
            (&self.num_restores, scheduler.num_restores),
            (&self.num_handed_back, scheduler.num_handed_back),
            (&self.num_drafts, scheduler.num_drafts),
            (&self.num_draft_tokens, scheduler.num_draft_tokens),
            (
                &self.num_accepted_draft_tokens,
                scheduler.num_accepted_draft_tokens,
            ),
            (&self.num_missed_objectives, scheduler.num_missed_objectives),
            (&self.num_evicted_pages, scheduler.num_evicted_pages),
            (&self.num_steps, stats.num_steps),
            (&self.num_failed_steps, stats.num_failed_steps),
            (&self.num_slow_steps, stats.num_slow_steps),
        ];
        self.step_tokens.update(&stats.step_tokens);
        let hits = &scheduler.prefix_hits;
        let hits = [
            ("cached", hits.num_cached_tokens),
            ("copied", hits.num_copied_tokens),
            ("shared", hits.num_shared_tokens),
            ("resumed", hits.num_resumed_tokens),
        ];
        for (source, count) in hits {
            let counter = self
                .prefix_cache_hit_tokens
                .get_or_create(&SourceLabels { source });
            counter.inner().fetch_max(count, Ordering::Relaxed);
        }
        let by_position = scheduler.accepted_by_position.0;
        let by_position = self.accepted_by_position.iter().zip(by_position);
        for (counter, count) in copies.into_iter().chain(by_position) {
            // Two concurrent scrapes may bring their snapshots out of order.
            counter.inner().fetch_max(count, Ordering::Relaxed);
        }
        // The bit patterns of non-negative floats have the order of the floats.
        let step_seconds = stats.step_time.as_secs_f64().to_bits();
        let inner = self.step_seconds.inner();
        inner.fetch_max(step_seconds, Ordering::Relaxed);
    }
}
