//! The histogram of tokens per step, which the engine counts.

use std::fmt;

use corella_engine::StepTokens;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

pub struct StepTokenHistogram(pub StepTokens);

impl EncodeMetric for StepTokenHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let tokens = &self.0;
        let bounds = StepTokens::BOUNDS.into_iter().map(|bound| bound as f64);
        let buckets: Vec<(f64, u64)> = bounds
            .chain([f64::INFINITY])
            .zip(tokens.num_steps)
            .collect();
        let num_steps = tokens.num_steps.iter().sum();
        encoder.encode_histogram::<NoLabelSet>(tokens.num_tokens as f64, num_steps, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
