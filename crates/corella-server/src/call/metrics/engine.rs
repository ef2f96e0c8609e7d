//! The engine's counts, which are read at each scrape. Each metric is a row.

use std::fmt;
use std::hash::Hash;

use corella_core::{SchedulerStats, Speculation};
use corella_engine::{Engine, EngineStats, KvDiskStats, StepTokens};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::wire::metric_series::{encode_both, encode_ours};

use super::step_token_histogram::StepTokenHistogram;

/// A metric of the stats `S`.
struct Row<S> {
    name: &'static str,
    help: &'static str,
    value: Value<S>,
    /// Whether vLLM has a metric of the same name.
    is_in_vllm: bool,
}

/// The kind of a metric, and the function that reads its value.
enum Value<S> {
    Gauge(fn(&S) -> u64),
    /// A gauge from 0 to 1.
    Share(fn(&S) -> f64),
    Counter(fn(&S) -> u64),
    Seconds(fn(&S) -> f64),
    /// A counter for each value of a label.
    Counters(&'static str, fn(&S) -> Vec<(&'static str, u64)>),
    StepTokens(fn(&S) -> StepTokens),
}

impl<S> Row<S> {
    const fn new(name: &'static str, value: Value<S>) -> Self {
        Self {
            name,
            help: "",
            value,
            is_in_vllm: false,
        }
    }

    const fn gauge(name: &'static str, value: fn(&S) -> u64) -> Self {
        Self::new(name, Value::Gauge(value))
    }

    const fn counter(name: &'static str, value: fn(&S) -> u64) -> Self {
        Self::new(name, Value::Counter(value))
    }

    const fn help(mut self, help: &'static str) -> Self {
        self.help = help;
        self
    }

    const fn in_vllm(mut self) -> Self {
        self.is_in_vllm = true;
        self
    }

    fn encode(&self, stats: &S, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        match &self.value {
            Value::Gauge(value) => self.write(encoder, &ConstGauge::new(value(stats))),
            Value::Share(value) => self.write(encoder, &ConstGauge::new(value(stats))),
            Value::Counter(value) => self.write(encoder, &ConstCounter::new(value(stats))),
            Value::Seconds(value) => self.write(encoder, &ConstCounter::new(value(stats))),
            Value::Counters(label, values) => self.write(encoder, &labelled(label, values(stats))),
            Value::StepTokens(tokens) => self.write(encoder, &StepTokenHistogram(tokens(stats))),
        }
    }

    fn write(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        metric: &impl EncodeMetric,
    ) -> fmt::Result {
        match self.is_in_vllm {
            true => encode_both(encoder, self.name, self.help, metric),
            false => encode_ours(encoder, self.name, self.help, metric),
        }
    }
}

/// The scheduler's counts.
type SchedulerRow = Row<SchedulerStats>;
/// The counts of steps.
type StepRow = Row<EngineStats>;
/// The counts of the disk that keeps KV blocks.
type DiskRow = Row<KvDiskStats>;

const SCHEDULER: &[SchedulerRow] = &[
    SchedulerRow::gauge("num_requests_running", |stats| stats.num_running as u64)
        .help("Requests that are running")
        .in_vllm(),
    // A request whose KV has arrived waits for a slot like any other.
    SchedulerRow::gauge("num_requests_waiting", |stats| {
        (stats.num_waiting + stats.num_arrived) as u64
    })
    .help(
        "Requests that wait to start, to resume after a preemption, or to decode with the KV of \
         another node",
    )
    .in_vllm(),
    SchedulerRow::gauge("num_requests_receiving", |stats| stats.num_receiving as u64)
        .help("Requests whose prompt another node computes, until all its KV is here"),
    SchedulerRow::gauge("max_passed_over", |stats| stats.max_passed_over.into())
        .help("Most steps in which others overtook one waiting request"),
    SchedulerRow::counter("num_preemptions", |stats| stats.num_preemptions)
        .help("Preemptions of running requests")
        .in_vllm(),
    SchedulerRow::counter("requests_too_late", |stats| stats.num_missed_objectives)
        .help("Requests that --slo-admission refused or ended"),
    SchedulerRow::counter("requests_handed_back", |stats| stats.num_handed_back).help(
        "Requests of other nodes that were preempted and went back, because their KV could not be \
         kept",
    ),
    SchedulerRow::new(
        "kv_cache_usage_perc",
        Value::Share(|stats| stats.num_in_use_pages as f64 / stats.num_pages.max(1) as f64),
    )
    .help("Share of the KV pages that running requests hold, from 0 to 1")
    .in_vllm(),
    SchedulerRow::gauge("kv_pages_in_use", |stats| stats.num_in_use_pages as u64)
        .help("KV pages that running requests hold, pinned ones included"),
    SchedulerRow::gauge("kv_pages_cached", |stats| stats.num_cached_pages as u64)
        .help("KV pages in the prefix cache that no running request holds"),
    SchedulerRow::gauge("kv_pages_pinned", |stats| stats.num_pinned_pages as u64)
        .help("KV pages of pinned prefixes, which are never evicted"),
    SchedulerRow::gauge("kv_pages_held", |stats| stats.num_held_pages as u64).help(
        "KV pages that other nodes may still read or write after their request has ended here",
    ),
    SchedulerRow::counter("kv_pages_evicted", |stats| stats.num_evicted_pages)
        .help("Cached KV pages that were evicted"),
    SchedulerRow::gauge("kv_spilled_pages", |stats| stats.num_spilled_pages as u64)
        .help("KV pages of preempted requests in host memory (--kv-spill-memory)"),
    SchedulerRow::counter("kv_spills", |stats| stats.num_spills)
        .help("Preempted requests whose KV went to host memory"),
    SchedulerRow::counter("kv_restores", |stats| stats.num_restores)
        .help("Requests that got their KV back from host memory"),
    SchedulerRow::gauge("state_snapshots", |stats| stats.num_snapshots as u64).help(
        "Copies of recurrent state, from which requests with the same prefix continue, and copies \
         on their way to another node",
    ),
    SchedulerRow::counter("prefix_cache_queries", |stats| {
        stats.num_prefix_query_tokens
    })
    .help("Tokens looked up in the prefix cache")
    .in_vllm(),
    SchedulerRow::counter("prefix_cache_hits", |stats| stats.num_prefix_hit_tokens)
        .help("Tokens found in the prefix cache")
        .in_vllm(),
    SchedulerRow::new("prefix_cache_hit_tokens", Value::Counters("source", hits)).help(
        "Tokens not computed, by source: cached in pages of earlier steps, copied rows of a page, \
         shared within a step, resumed after a preemption",
    ),
    SchedulerRow::counter("spec_decode_num_drafts", |stats| stats.num_drafts)
        .help("Times at which a request had draft tokens in a step")
        .in_vllm(),
    SchedulerRow::counter("spec_decode_num_draft_tokens", |stats| {
        stats.num_draft_tokens
    })
    .help("Draft tokens that were checked")
    .in_vllm(),
    SchedulerRow::counter("spec_decode_num_accepted_tokens", |stats| {
        stats.num_accepted_draft_tokens
    })
    .help("Generated tokens that had been drafted, and took no step of their own")
    .in_vllm(),
];

const STEPS: &[StepRow] = &[
    StepRow::counter("steps", |stats| stats.num_steps).help("Steps that were computed"),
    StepRow::new(
        "step_seconds",
        Value::Seconds(|stats| stats.step_time.as_secs_f64()),
    )
    .help("Time spent in steps"),
    StepRow::counter("failed_steps", |stats| stats.num_failed_steps).help("Steps that failed"),
    StepRow::counter("slow_steps", |stats| stats.num_slow_steps)
        .help("Steps that took longer than 30 seconds"),
    StepRow::new(
        "iteration_tokens_total",
        Value::StepTokens(|stats| stats.step_tokens),
    )
    .help("Tokens of a step, prompts and outputs together")
    .in_vllm(),
];

const DISK: &[DiskRow] = &[
    DiskRow::gauge("kv_disk_on", |disk| disk.is_on.into())
        .help("1 while blocks are kept on the disk, 0 before the file is open and after an error"),
    DiskRow::gauge("kv_disk_blocks", |disk| disk.num_pages as u64).help("KV blocks on the disk"),
    DiskRow::gauge("kv_disk_max_blocks", |disk| disk.max_pages.into())
        .help("KV blocks for which the file on the disk has room"),
    DiskRow::counter("kv_disk_blocks_stored", |disk| disk.num_stored)
        .help("KV blocks that were written to the disk"),
    DiskRow::counter("kv_disk_hits", |disk| disk.num_read)
        .help("KV blocks that were read from the disk for requests"),
    DiskRow::counter("kv_disk_written_bytes", |disk| disk.bytes_written)
        .help("Bytes that were written to the disk"),
    DiskRow::counter("kv_disk_read_bytes", |disk| disk.bytes_read)
        .help("Bytes of blocks that were read from the disk"),
    DiskRow::counter("kv_disk_damaged_blocks", |disk| disk.num_damaged)
        .help("KV blocks on the disk that proved torn or damaged"),
    DiskRow::counter("kv_disk_errors", |disk| disk.num_errors).help("Errors of the disk"),
];

fn hits(stats: &SchedulerStats) -> Vec<(&'static str, u64)> {
    let hits = &stats.prefix_hits;
    vec![
        ("cached", hits.num_cached_tokens),
        ("copied", hits.num_copied_tokens),
        ("shared", hits.num_shared_tokens),
        ("resumed", hits.num_resumed_tokens),
    ]
}

/// A counter for each value of a label.
fn labelled<V: Clone + Hash + Eq>(
    label: &str,
    counts: impl IntoIterator<Item = (V, u64)>,
) -> Family<Vec<(&str, V)>, Counter> {
    let family = Family::<Vec<(&str, V)>, Counter>::default();
    for (value, count) in counts {
        family.get_or_create(&vec![(label, value)]).inc_by(count);
    }
    family
}

fn encode_rows<S>(rows: &[Row<S>], stats: &S, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    rows.iter().try_for_each(|row| row.encode(stats, encoder))
}

/// Reads the engine's counts at each scrape.
pub struct EngineMetrics(pub Engine);

impl fmt::Debug for EngineMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineMetrics")
    }
}

impl Collector for EngineMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.0.stats();
        encode_rows(SCHEDULER, &stats.scheduler, &mut encoder)?;
        encode_rows(STEPS, &stats, &mut encoder)?;
        if let Some(disk) = &stats.kv_disk {
            encode_rows(DISK, disk, &mut encoder)?;
        }
        let limits = self.0.limits();
        let num_positions = match limits.speculation {
            // Without speculation, the first position is printed, so that the metric's name appears like the others.
            Speculation::Off => 1,
            _ => limits.max_draft_tokens as usize,
        };
        let by_position = stats.scheduler.accepted_by_position.0.into_iter();
        encode_both(
            &mut encoder,
            "spec_decode_num_accepted_tokens_per_pos",
            "Generated tokens that had been drafted, by position: 0 is the first draft token of a request in a step",
            &labelled("position", by_position.enumerate().take(num_positions)),
        )
    }
}
