//! Metrics of output tokens and of finished choices. The metrics count calls of clients and, on a decode node, requests
//! of other nodes.

use std::sync::Arc;
use std::time::Instant;

use corella_core::{FinishReason, RequestOutput};
use corella_engine::{OutputCount, OutputMeter};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::adapter::adapter_name::served_name;
use crate::adapter::adapter_use::{AdapterCall, AdapterUses};
use crate::call::recent_latency::RecentLatency;

use super::{LENGTH_BUCKETS, Names, REQUEST_BUCKETS};

const TOKEN_BUCKETS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
];

/// Clones share the counts.
#[derive(Clone)]
pub struct OutputMetrics {
    finished: Family<FinishLabels, Counter>,
    generation_tokens: Counter,
    received_prompt_tokens: Counter,
    request_generation_tokens: Histogram,
    decode_seconds: Histogram,
    inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    /// The adapters in use.
    pub adapter_uses: Arc<AdapterUses>,
    /// The latency of recent tokens, for watchers of the engine.
    pub recent_latency: Arc<RecentLatency>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    finished_reason: &'static str,
}

/// The times of one choice's tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenTimes {
    pub first: Instant,
    pub last: Instant,
    pub num_tokens: u32,
}

impl Default for OutputMetrics {
    fn default() -> Self {
        Self {
            finished: Family::default(),
            generation_tokens: Counter::default(),
            received_prompt_tokens: Counter::default(),
            request_generation_tokens: Histogram::new(LENGTH_BUCKETS),
            decode_seconds: Histogram::new(REQUEST_BUCKETS),
            inter_token_latency: Histogram::new(TOKEN_BUCKETS),
            time_per_output_token: Histogram::new(TOKEN_BUCKETS),
            adapter_uses: Arc::default(),
            recent_latency: Arc::default(),
        }
    }
}

impl OutputMetrics {
    pub(super) fn register(&self, names: &mut Names<'_>) {
        names.both(
            "request_success",
            "Choices that ended, by finished_reason (abort: the client left; pooled: a vector was made)",
            self.finished.clone(),
        );
        for finished_reason in ["stop", "length", "abort", "error"] {
            // A series must start at zero, or a rate misses its first increase.
            let _ = self
                .finished
                .get_or_create(&FinishLabels { finished_reason });
        }
        names.both(
            "generation_tokens",
            "Tokens generated",
            self.generation_tokens.clone(),
        );
        names.ours(
            "received_prompt_tokens",
            "Prompt tokens whose KV other nodes have computed and sent here",
            self.received_prompt_tokens.clone(),
        );
        names.both(
            "request_decode_time_seconds",
            "Time from the first token of a choice to its last",
            self.decode_seconds.clone(),
        );
        names.both(
            "request_generation_tokens",
            "Generated tokens of a choice that ended by itself",
            self.request_generation_tokens.clone(),
        );
        names.both(
            "inter_token_latency_seconds",
            "Time between two tokens of a choice",
            self.inter_token_latency.clone(),
        );
        names.0.register(
            "vllm:time_per_output_token_seconds",
            "Time between two tokens of a choice, under vLLM's older name",
            self.inter_token_latency.clone(),
        );
        names.both(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a choice",
            self.time_per_output_token.clone(),
        );
    }

    /// Counts a token. Returns whether it is the first of its choice.
    pub(super) fn handle_token(&self, times: &mut Option<TokenTimes>, now: Instant) -> bool {
        self.generation_tokens.inc();
        let Some(times) = times else {
            *times = Some(TokenTimes {
                first: now,
                last: now,
                num_tokens: 1,
            });
            return true;
        };
        let latency = now - times.last;
        self.inter_token_latency.observe(latency.as_secs_f64());
        if let Some(recent) = self.recent_latency.watched() {
            recent.inter_token.observe(latency);
        }
        times.last = now;
        times.num_tokens += 1;
        false
    }

    /// Counts a choice that has ended by itself.
    pub(super) fn handle_finish(&self, times: &TokenTimes) {
        let decode = (times.last - times.first).as_secs_f64();
        let num_tokens = f64::from(times.num_tokens);
        self.decode_seconds.observe(decode);
        self.request_generation_tokens.observe(num_tokens);
        if times.num_tokens > 1 {
            self.time_per_output_token
                .observe(decode / (num_tokens - 1.0));
        }
    }

    pub(super) fn count_ends(&self, finished_reason: &'static str, num_choices: usize) {
        self.finished
            .get_or_create(&FinishLabels { finished_reason })
            .inc_by(num_choices as u64);
    }
}

impl OutputMeter for OutputMetrics {
    fn begin(&self, num_received_tokens: u32, adapter: Option<&str>) -> Box<dyn OutputCount> {
        self.received_prompt_tokens
            .inc_by(num_received_tokens.into());
        let adapter = adapter.map(|name| self.adapter_uses.begin(served_name(name)));
        Box::new(ReceivedCount {
            metrics: self.clone(),
            adapter,
            times: None,
            has_ended: false,
        })
    }
}

/// Counts a request from another node.
struct ReceivedCount {
    metrics: OutputMetrics,
    adapter: Option<AdapterCall>,
    times: Option<TokenTimes>,
    has_ended: bool,
}

impl OutputCount for ReceivedCount {
    fn handle_output(&mut self, output: &RequestOutput) {
        if output.sample.is_some() {
            self.metrics.handle_token(&mut self.times, Instant::now());
            if let Some(adapter) = &mut self.adapter {
                adapter.handle_output();
            }
        }
        let reason = match &output.finish {
            None => return,
            Some(FinishReason::EndToken | FinishReason::StopToken) => "stop",
            Some(FinishReason::Length) => "length",
            Some(FinishReason::Aborted) => "abort",
            Some(FinishReason::Error(_)) => "error",
        };
        self.has_ended = true;
        self.metrics.count_ends(reason, 1);
        if matches!(reason, "stop" | "length")
            && let Some(times) = &self.times
        {
            self.metrics.handle_finish(times);
        }
    }
}

impl Drop for ReceivedCount {
    fn drop(&mut self) {
        if !self.has_ended {
            self.metrics.count_ends("abort", 1);
        }
    }
}
