//! What a node of a cluster adds to `/metrics`.

use std::fmt;
use std::sync::Arc;

use corella_cluster::Peers;
use corella_cluster::session::{DecodeNode, PrefillNode};
use corella_core::PeerStanding;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Unit;

/// Read at each scrape.
#[derive(Debug)]
pub enum ClusterMetrics {
    Prefill(PrefillMetrics),
    Decode(DecodeMetrics),
}

pub struct PrefillMetrics {
    pub node: PrefillNode,
    pub peers: Arc<Peers>,
}

pub struct DecodeMetrics(pub Arc<DecodeNode>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StandingLabels {
    standing: &'static str,
}

impl Collector for ClusterMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        match self {
            Self::Prefill(PrefillMetrics { node, peers }) => {
                let stats = node.stats();
                gauge(
                    &mut encoder,
                    "corella_sessions",
                    "Requests of clients that have not ended",
                    stats.num_sessions as i64,
                )?;
                counter(
                    &mut encoder,
                    "corella_remote_tokens",
                    "Tokens that decode nodes have sent back",
                    stats.num_remote_tokens,
                )?;
                counter(
                    &mut encoder,
                    "corella_kv_sent_bytes",
                    "Bytes of KV rows sent to decode nodes",
                    stats.num_bytes_sent,
                )?;
                let nodes = Family::<StandingLabels, Gauge>::default();
                let standings = [
                    (PeerStanding::Healthy, "healthy"),
                    (PeerStanding::Suspect, "suspect"),
                    (PeerStanding::Incompatible, "incompatible"),
                    (PeerStanding::Draining, "draining"),
                ];
                let known = peers.with_table(|table, now_us| table.decode_nodes(now_us));
                for (standing, name) in standings {
                    let num_nodes = { known.iter() }
                        .filter(|node| node.standing == standing)
                        .count();
                    let labels = StandingLabels { standing: name };
                    nodes.get_or_create(&labels).set(num_nodes as i64);
                }
                let help = "Decode nodes by what is known of them";
                encode(&mut encoder, "corella_decode_nodes", help, &nodes)
            }
            Self::Decode(DecodeMetrics(node)) => gauge(
                &mut encoder,
                "corella_sessions",
                "Requests of other nodes that have not ended, or whose pages may still be written to",
                node.num_sessions() as i64,
            ),
        }
    }
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> fmt::Result {
    encode(encoder, name, help, &ConstGauge::new(value))
}

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    encode(encoder, name, help, &ConstCounter::new(value))
}

fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    let unit: Option<&Unit> = None;
    metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
}

impl fmt::Debug for PrefillMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metrics of a prefill node")
    }
}

impl fmt::Debug for DecodeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metrics of a decode node")
    }
}
