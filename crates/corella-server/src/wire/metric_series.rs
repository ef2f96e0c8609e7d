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

/// Writes a metric as `corella_NAME`.
pub fn encode_ours(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    encode(encoder, &format!("corella_{name}"), help, metric)
}

/// Writes a metric as `corella_NAME` and `vllm:NAME`.
pub fn encode_both(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    encode(encoder, &format!("vllm:{name}"), help, metric)?;
    encode_ours(encoder, name, help, metric)
}
