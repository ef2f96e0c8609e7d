//! The place where a request decodes: one of the decode nodes, or the node that prefills it.
//!
//! Many prefill nodes choose among the same decode nodes, each by reports that may be about a second old. If each took
//! the best node, all would choose the same one at once. So `Weighted` draws in proportion to free pages, less the
//! pages that this node has reserved and that no report counts yet.

use alloc::vec::Vec;

use crate::{ComputePlace, NodeId, SchedulerStats};

/// A transfer may take this much longer than computing its rows, or than a transfer to another node, before its link
/// counts as slow. Round trips and waits for a processor core can take this much of a small transfer, so its speed says
/// little about a large transfer.
const TOLERATED_US: u128 = 50_000;

/// The rule that chooses one of the decode nodes with room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerPolicy {
    RoundRobin,
    /// Nodes are drawn in proportion to their free KV pages, and less often behind a slow link.
    /// While too few nodes report, they take turns.
    Weighted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementConfig {
    pub policy: PeerPolicy,
    /// A shorter prompt decodes where it was prefilled, because it disturbs other requests only briefly.
    pub disaggregate_min_tokens: u32,
    /// The node that computes the rest of a prompt when a decode node has a part of it. With `None`, the costs decide.
    pub compute_place: Option<ComputePlace>,
    /// The age beyond which a report is ignored.
    pub max_report_age_us: u64,
    /// While a smaller share of the healthy nodes reports, nodes take turns: weights would send all requests to the few
    /// that report.
    pub min_reporting_percent: u32,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            policy: PeerPolicy::Weighted,
            disaggregate_min_tokens: 0,
            compute_place: None,
            max_report_age_us: 3_000_000,
            min_reporting_percent: 80,
        }
    }
}

/// Whether a decode node can take requests at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStanding {
    Healthy,
    /// The node has not answered yet, or has stopped answering.
    Suspect,
    /// The node answers, but serves another model or speaks another protocol.
    Incompatible,
    /// The node finishes its requests and takes no new ones.
    Draining,
}

/// A decode node's report of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    pub num_free_pages: u32,
    pub num_running: u32,
    /// Requests that have all their KV and lack a slot.
    pub num_waiting: u32,
    /// Reservations that the node has granted to all peers since it started. By this number, a peer knows which of the
    /// peer's reservations `num_free_pages` already counts.
    pub num_reservations: u64,
    pub is_draining: bool,
    /// The node's time for 1,024 prompt tokens, in microseconds; 0 before the node has computed any.
    pub prefill_us: u64,
    /// The node's time per output token of one more request, in microseconds; 0 while none decodes.
    pub tpot_us: u64,
    /// The longest prompt that the node takes, if it has a limit.
    pub max_prompt_tokens: Option<u32>,
}

impl LoadReport {
    /// A decode node's report from the state of its engine.
    pub fn of(stats: &SchedulerStats, is_draining: bool, max_prompt_tokens: Option<u32>) -> Self {
        Self {
            // Cached pages are freed on demand.
            num_free_pages: (stats.num_free_pages + stats.num_cached_pages) as u32,
            num_running: stats.num_running as u32,
            num_waiting: (stats.num_waiting + stats.num_arrived) as u32,
            num_reservations: stats.num_reservations,
            is_draining,
            prefill_us: stats.bulk_prefill_us,
            tpot_us: stats.expected_tpot_us,
            max_prompt_tokens,
        }
    }
}

/// One decode node as this node knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeCandidate {
    pub peer_id: NodeId,
    pub standing: PeerStanding,
    pub page_size: u32,
    /// The longest prompt that the node takes; `u32::MAX` means no limit.
    pub max_prompt_tokens: u32,
    pub report: Option<LoadReport>,
    pub report_age_us: u64,
    /// Pages that this node has reserved and that the report does not count yet.
    pub num_unreported_pages: u32,
    /// Bytes per second over the link from here to the node; `None` before the first measurement.
    pub bandwidth: Option<u64>,
    /// Rows of the request's prompt in the node's prefix tree, as far as this node knows.
    pub num_cached_rows: u32,
}

/// The input of a placement, besides the request.
#[derive(Clone, Copy, Debug)]
pub struct Fleet<'a> {
    /// The decode nodes. Their order must not change from one call to the next.
    pub nodes: &'a [DecodeCandidate],
    /// Whether this node may decode the request itself, and has room in its queue.
    pub falls_back: bool,
    pub kv_bytes_per_token: u64,
    /// The time for 1,024 prompt tokens here, in microseconds; 0 before the first measurement.
    pub prefill_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementRequest {
    pub num_prompt_tokens: u32,
    pub num_expected_output_tokens: u32,
    /// The longest useful time per output token, in microseconds.
    pub max_tpot_us: Option<u64>,
}

impl PlacementRequest {
    /// Pages that a node must have free. The request's cached pages count as well, because a node counts unlocked
    /// cached pages among its free pages.
    pub fn num_pages(&self, page_size: u32) -> u64 {
        let num_tokens =
            u64::from(self.num_prompt_tokens) + u64::from(self.num_expected_output_tokens);
        num_tokens.div_ceil(page_size.max(1).into())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Remote(NodeId),
    Local,
    /// No node has room.
    Full,
}

impl Fleet<'_> {
    /// Chooses a node for one request. `cursor` counts the requests placed here, from a start that should differ from
    /// one prefill node to the next. Nodes in `refused` are excluded.
    pub fn place(
        &self,
        config: &PlacementConfig,
        request: &PlacementRequest,
        cursor: u64,
        refused: &[NodeId],
    ) -> Placement {
        let is_short = request.num_prompt_tokens < config.disaggregate_min_tokens;
        if is_short && self.falls_back {
            return Placement::Local;
        }
        let choice = Choice {
            config,
            fleet: self,
            request,
        };
        let fitting = self
            .nodes
            .iter()
            .filter(|node| choice.fits(node) && !refused.contains(&node.peer_id));
        let (near, far): (Vec<_>, Vec<_>) = fitting.partition(|node| !choice.is_far(node));
        if let Some(peer_id) = choice.among(near, cursor) {
            return Placement::Remote(peer_id);
        }
        if self.falls_back {
            return Placement::Local;
        }
        match choice.among(far, cursor) {
            Some(peer_id) => Placement::Remote(peer_id),
            None => Placement::Full,
        }
    }
}

struct Choice<'a> {
    config: &'a PlacementConfig,
    fleet: &'a Fleet<'a>,
    request: &'a PlacementRequest,
}

impl Choice<'_> {
    fn report(&self, node: &DecodeCandidate) -> Option<LoadReport> {
        node.report
            .filter(|_| node.report_age_us <= self.config.max_report_age_us)
    }

    fn num_free_pages(&self, node: &DecodeCandidate) -> Option<u32> {
        let report = self.report(node)?;
        Some(
            report
                .num_free_pages
                .saturating_sub(node.num_unreported_pages),
        )
    }

    /// Whether a node has room and time. A node without a report counts as having both. It refuses the request if it
    /// lacks one of them.
    fn fits(&self, node: &DecodeCandidate) -> bool {
        let has_room = self.num_free_pages(node).is_none_or(|num_free_pages| {
            u64::from(num_free_pages) >= self.request.num_pages(node.page_size)
        });
        let tpot_us = self.report(node).map_or(0, |report| report.tpot_us);
        node.standing == PeerStanding::Healthy
            && self
                .request
                .max_tpot_us
                .is_none_or(|max_us| tpot_us <= max_us)
            && self.request.num_prompt_tokens <= node.max_prompt_tokens
            && has_room
    }

    /// Whether sending the rows that the node lacks would take longer than computing them. A link of unknown speed is
    /// tried, because a single transfer shows its speed.
    fn is_far(&self, node: &DecodeCandidate) -> bool {
        let Some(bandwidth) = node.bandwidth.filter(|_| self.fleet.prefill_us > 0) else {
            return false;
        };
        let recompute_us = { self.num_rows(node) } * u128::from(self.fleet.prefill_us) / 1024;
        self.transfer_us(node, bandwidth) > recompute_us + TOLERATED_US
    }

    /// The number of rows that the node lacks.
    fn num_rows(&self, node: &DecodeCandidate) -> u128 {
        let num_prompt_tokens = self.request.num_prompt_tokens;
        num_prompt_tokens
            .saturating_sub(node.num_cached_rows)
            .into()
    }

    fn transfer_us(&self, node: &DecodeCandidate, bandwidth: u64) -> u128 {
        let num_bytes = self.num_rows(node) * u128::from(self.fleet.kv_bytes_per_token);
        num_bytes * 1_000_000 / u128::from(bandwidth.max(1))
    }

    fn among(&self, mut nodes: Vec<&DecodeCandidate>, cursor: u64) -> Option<NodeId> {
        // A node with waiting requests is left out if another node has none: a new request would wait behind them.
        let is_idle = |node: &&DecodeCandidate| {
            self.report(node)
                .is_none_or(|report| report.num_waiting == 0)
        };
        if nodes.iter().any(is_idle) {
            nodes.retain(is_idle);
        }
        // Nodes that take longer prompts are kept for longer prompts, so only the nodes with the shortest limit remain.
        let shortest_limit = nodes.iter().map(|node| node.max_prompt_tokens).min()?;
        nodes.retain(|node| node.max_prompt_tokens == shortest_limit);

        let is_weighted = self.config.policy == PeerPolicy::Weighted && self.enough_report();
        if is_weighted && nodes.iter().any(|node| self.report(node).is_some()) {
            nodes.retain(|node| self.report(node).is_some());
            return Some(self.draw(&nodes, cursor));
        }
        let index = cursor % nodes.len() as u64;
        Some(nodes[index as usize].peer_id)
    }

    fn enough_report(&self) -> bool {
        let healthy = || {
            self.fleet
                .nodes
                .iter()
                .filter(|node| node.standing == PeerStanding::Healthy)
        };
        let num_reporting = healthy().filter(|node| self.report(node).is_some()).count();
        num_reporting as u64 * 100
            >= healthy().count() as u64 * u64::from(self.config.min_reporting_percent)
    }

    /// Draws in proportion to weights. Consecutive cursors give evenly spaced points (a Weyl sequence on the golden
    /// ratio), so that even a few requests are shared out as evenly as many.
    fn draw(&self, nodes: &[&DecodeCandidate], cursor: u64) -> NodeId {
        const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
        let fastest = nodes.iter().filter_map(|node| node.bandwidth).max();
        let weights: Vec<u64> = nodes
            .iter()
            .map(|node| self.weight(node, fastest))
            .collect();
        let total: u64 = weights.iter().sum();
        let point = u128::from(cursor.wrapping_mul(GOLDEN_RATIO));
        let mut rest = ((point * u128::from(total)) >> 64) as u64;
        for (node, &weight) in nodes.iter().zip(&weights) {
            if rest < weight {
                return node.peer_id;
            }
            rest -= weight;
        }
        nodes[nodes.len() - 1].peer_id
    }

    fn weight(&self, node: &DecodeCandidate, fastest: Option<u64>) -> u64 {
        let num_free_pages = u64::from(self.num_free_pages(node).unwrap_or(0));
        // A link without a measurement counts as fast. Otherwise it would never be measured.
        let weight = match (node.bandwidth, fastest) {
            (Some(bandwidth), Some(fastest)) => {
                let least_us = TOLERATED_US + self.transfer_us(node, fastest);
                let transfer_us = TOLERATED_US + self.transfer_us(node, bandwidth);
                (u128::from(num_free_pages).saturating_mul(least_us) / transfer_us) as u64
            }
            _ => num_free_pages,
        };
        weight.max(1)
    }
}
