//! The metrics of the engine's counts, which are read at each scrape.

use std::fmt;
use std::hash::Hash;

use corella_core::{Metric, MetricValue, SchedulerStats, Speculation};
use corella_engine::{Engine, EngineStats, KvDiskStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::wire::metric_series::{encode_both, encode_ours};

use super::step_token_histogram::StepTokenHistogram;

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
        encode_all(SchedulerStats::METRICS, &stats.scheduler, &mut encoder)?;
        encode_all(EngineStats::METRICS, &stats, &mut encoder)?;
        if let Some(disk) = &stats.kv_disk {
            let metrics = match disk.is_in_memory {
                true => KvDiskStats::HOST_METRICS,
                false => KvDiskStats::METRICS,
            };
            encode_all(metrics, disk, &mut encoder)?;
        }
        encode_both(
            &mut encoder,
            "iteration_tokens_total",
            "Tokens of a step, prompts and outputs together",
            &StepTokenHistogram(stats.step_tokens),
        )?;
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

fn encode_all<S: 'static>(
    metrics: &[Metric<S>],
    stats: &S,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    metrics.iter().try_for_each(|metric| match metric.value {
        MetricValue::Gauge(value) => write(encoder, metric, &ConstGauge::new(value(stats))),
        MetricValue::Share(value) => {
            let [part, whole] = value(stats);
            let share = part as f64 / whole.max(1) as f64;
            write(encoder, metric, &ConstGauge::new(share))
        }
        MetricValue::Counter(value) => write(encoder, metric, &ConstCounter::new(value(stats))),
        MetricValue::Time(value) => {
            let seconds = value(stats).as_secs_f64();
            write(encoder, metric, &ConstCounter::new(seconds))
        }
        MetricValue::Counters(label, values) => {
            let values = values.iter().map(|(name, value)| (*name, value(stats)));
            write(encoder, metric, &labelled(label, values))
        }
    })
}

fn write<S: 'static>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric<S>,
    value: &impl EncodeMetric,
) -> fmt::Result {
    match metric.is_in_vllm {
        true => encode_both(encoder, metric.name, metric.help, value),
        false => encode_ours(encoder, metric.name, metric.help, value),
    }
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
