//! The histogram of the tokens of steps, which the engine counts.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use corella_engine::StepTokens;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct StepTokenHistogram(Arc<Mutex<StepTokens>>);

impl StepTokenHistogram {
    /// Takes the engine's counts, unless a concurrent scrape has brought later ones.
    pub fn update(&self, tokens: &StepTokens) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.num_tokens > known.num_tokens {
            *known = *tokens;
        }
    }
}

impl EncodeMetric for StepTokenHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let tokens = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
