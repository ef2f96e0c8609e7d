//! The metrics of a cluster node.

use std::fmt;

use corella_core::{ComputePlace, PeerStanding, StayReason};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::ClusterNode;
use super::role::RunningRole;
use crate::blocks::SourceStats;
use crate::kv_connector::{FetchOutcome, KeptEnd, KvConnector, PromptFetchOutcome};
use crate::metric::{counter, encode, gauge};
use crate::session::{DecodeNode, PrefillNode, PrefillTimes};

/// Metrics of the role that the node has when scraped.
#[derive(Debug)]
pub struct NodeMetrics(pub ClusterNode);

impl Collector for NodeMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let role = self.0.running_role();
        encode_role(&role, &mut encoder)?;
        if let Some(source) = role.block_source() {
            encode_source(source.stats(), &mut encoder)?;
        }
        match role.connector() {
            Some(connector) => encode_connector(connector, &mut encoder),
            None => Ok(()),
        }
    }
}

/// Encodes metrics of cached blocks that other nodes load.
fn encode_source(stats: SourceStats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let answers = [
        ("found", stats.num_found),
        ("refused", stats.num_refused),
        ("complete", stats.num_complete),
        ("failed", stats.num_failed),
    ];
    let help = "Lookups and loads of this node's cached blocks by other nodes, by the answer";
    outcomes(encoder, "corella_block_answers", help, answers)
}

/// Encodes metrics of requests that proxies paired.
fn encode_connector(connector: &KvConnector, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Some(kept) = &connector.kept {
        gauge(
            encoder,
            "corella_kept_prompts",
            "Prompts that are computed or kept for a node that a proxy chooses",
            kept.num_kept() as i64,
        )?;
        let ends = KeptEnd::ALL.map(|end| (end.as_str(), kept.num_ended(end)));
        let help = "Prompts that are no longer kept, by what has become of them";
        outcomes(encoder, "corella_kept_prompts_ended", help, ends)?;
    }
    if let Some(prompt_fetcher) = &connector.prompt_fetcher {
        let ends = PromptFetchOutcome::ALL.iter();
        let ends = ends.map(|&end| (end.as_str(), prompt_fetcher.num_requests(end)));
        let help = "Requests whose prompt another node had computed for a proxy, by whether its KV rows \
                    were fetched";
        outcomes(encoder, "corella_kv_pulls", help, ends)?;
        counter(
            encoder,
            "corella_kv_pulled_rows",
            "KV rows that were fetched from other nodes for a proxy",
            prompt_fetcher.num_rows(),
        )?;
    }
    if let Some(fetcher) = &connector.fetcher {
        let starts = FetchOutcome::ALL.iter();
        let starts = starts.map(|&start| (start.as_str(), fetcher.num_requests(start)));
        let help = "Requests that named a node with blocks of their prompt, by how the fetch began";
        outcomes(encoder, "corella_block_fetches", help, starts)?;
        let stats = fetcher.node().stats();
        let ends = [
            ("loaded", stats.num_loaded),
            ("not_found", stats.num_not_found),
            ("not_worth", stats.num_not_worth),
            ("refused", stats.num_refused),
            ("failed", stats.num_failed),
        ];
        let help = "Loads of other nodes' cached blocks, by how they ended";
        outcomes(encoder, "corella_block_loads", help, ends)?;
        counter(
            encoder,
            "corella_fetched_blocks",
            "Cached blocks that came from other nodes",
            stats.num_blocks,
        )?;
    }
    Ok(())
}

/// Encodes counters with the label `outcome`.
fn outcomes(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    counts: impl IntoIterator<Item = (&'static str, u64)>,
) -> fmt::Result {
    counters(encoder, name, help, "outcome", counts)
}

/// Encodes counters with one label, by its value.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    counts: impl IntoIterator<Item = (&'static str, u64)>,
) -> fmt::Result {
    let family = Family::<[(&str, &str); 1], Counter>::default();
    for (value, count) in counts {
        family.get_or_create(&[(label, value)]).inc_by(count);
    }
    encode(encoder, name, help, &family)
}

fn encode_role(role: &RunningRole, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    match role {
        RunningRole::Unified(_) => Ok(()),
        RunningRole::Prefill(role) => encode_prefill(&role.node, encoder),
        RunningRole::Decode(role) => encode_decode(&role.node, encoder),
    }
}

fn encode_prefill(node: &PrefillNode, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let stats = node.stats();
    gauge(
        encoder,
        "corella_sessions",
        "Requests of clients that have not ended",
        stats.num_sessions as i64,
    )?;
    counter(
        encoder,
        "corella_remote_tokens",
        "Tokens that decode nodes have sent back",
        stats.num_remote_tokens,
    )?;
    counter(
        encoder,
        "corella_kv_sent_bytes",
        "Bytes of KV rows sent to decode nodes",
        stats.num_bytes_sent,
    )?;
    let nodes = Family::<[(&str, &str); 1], Gauge>::default();
    let standings = [
        PeerStanding::Healthy,
        PeerStanding::Suspect,
        PeerStanding::Incompatible,
        PeerStanding::Draining,
    ];
    let known = node.with_peers(|peers, now_us| peers.decode_nodes(now_us));
    for standing in standings {
        let with_standing = known.iter().filter(|node| node.standing == standing);
        let labels = [("standing", standing_name(standing))];
        nodes
            .get_or_create(&labels)
            .set(with_standing.count() as i64);
    }
    let help = "Decode nodes by what is known of them";
    encode(encoder, "corella_decode_nodes", help, &nodes)?;
    let help = "Requests that this node decoded in place of a decode node, by why it did";
    let (fallbacks, reason) = (node.fallbacks(), "reason");
    counters(encoder, "corella_pd_fallbacks", help, reason, fallbacks)?;
    let stays = StayReason::ALL.map(|reason| (reason.label(), node.stays().get(reason)));
    let help = "Requests that no decode node was asked to take, by why they stayed here";
    counters(encoder, "corella_pd_stays", help, reason, stays)?;
    let decisions = [
        ("here", node.num_decisions(ComputePlace::Here)),
        ("there", node.num_decisions(ComputePlace::There)),
    ];
    let help = "Prompts of which a decode node was likely to have most, by whether the rest was \
                computed on this node or there";
    outcomes(encoder, "corella_pd_decisions", help, decisions)?;
    encode_prefill_times(node.times(), encoder)
}

fn encode_prefill_times(times: &PrefillTimes, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let histograms = [
        (
            "corella_pd_allocate_seconds",
            "From opening a session to the decode node's word that it takes the request",
            &times.allocate,
        ),
        (
            "corella_pd_prefill_seconds",
            "From the submission of a prompt for a decode node to its first token",
            &times.prefill,
        ),
        (
            "corella_pd_transfer_seconds",
            "From the first byte of KV rows to the decode node's word that it has them all",
            &times.transfer,
        ),
        (
            "corella_pd_transfer_hidden_share",
            "Share of a transfer that was over when its last layer was computed",
            &times.hidden_share,
        ),
        (
            "corella_pd_handover_seconds",
            "From the first token to the first one that the decode node sends",
            &times.handover,
        ),
    ];
    encode_all(encoder, &histograms)
}

fn encode_decode(node: &DecodeNode, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    gauge(
        encoder,
        "corella_sessions",
        "Requests of other nodes that have not ended, or whose pages may still be written to",
        node.num_sessions() as i64,
    )?;
    let times = node.times();
    let histograms = [
        (
            "corella_pd_reserve_seconds",
            "From asking the engine for pages to its answer",
            &times.reserve,
        ),
        (
            "corella_pd_load_seconds",
            "From asking for KV rows, perhaps before they are computed, to having them all",
            &times.load,
        ),
        (
            "corella_pd_first_decode_seconds",
            "From having KV rows and first token to the next token",
            &times.first_decode,
        ),
    ];
    encode_all(encoder, &histograms)
}

fn encode_all(
    encoder: &mut DescriptorEncoder<'_>,
    histograms: &[(&str, &str, &Histogram)],
) -> fmt::Result {
    for &(name, help, histogram) in histograms {
        encode(encoder, name, help, histogram)?;
    }
    Ok(())
}

/// The name of a peer's standing in metrics and status.
pub fn standing_name(standing: PeerStanding) -> &'static str {
    match standing {
        PeerStanding::Healthy => "healthy",
        PeerStanding::Suspect => "suspect",
        PeerStanding::Incompatible => "incompatible",
        PeerStanding::Draining => "draining",
    }
}
