//! A metric that a collector makes at the scrape.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};

/// Writes a metric with its description.
pub fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
}
