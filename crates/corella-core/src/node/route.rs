//! The route of a request: computed and decoded here, decoded by another node, or chosen after a fetch of cached
//! blocks.

use alloc::vec::Vec;

use crate::fleet::compute_choice::{ComputeCost, ComputePlace, ComputeSite};
use crate::fleet::placement::{Fleet, Placement, PlacementRequest};
use crate::node::directory::{Directory, Holder};
use crate::session::{FetchPace, NodeIncarnation};
use crate::stats::SchedulerStats;
use crate::{
    DecodeCandidate, Incarnation, MissedObjective, NodeId, ObjectiveKind, PageHash, SessionId,
};

/// The destination of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// This node computes and decodes it.
    Here(StayReason),
    /// `peer` decodes it. If `asks_first`, that node may also compute the rest of the prompt, and is asked first how
    /// much of the prompt it has.
    Session {
        peer: NodeIncarnation,
        asks_first: bool,
    },
    /// The blocks that the holder has are fetched first. Then the request takes another route.
    Fetch(Holder),
    /// The request needs a decode node, and none has room.
    Refused,
    /// The request's tokens would come too slowly from every node with room.
    TooSlow(MissedObjective),
}

/// The reason why a prefill node keeps a request instead of sending it to a decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// The prompt is shorter than [`PlacementConfig::disaggregate_min_tokens`](crate::PlacementConfig).
    Short,
    /// Sending the KV rows would take longer than computing the prompt.
    SlowLink,
    /// No decode node has room.
    NoRoom,
    /// The tokens of all decode nodes with room would come too slowly.
    TooSlow,
    /// The client asks for outputs of the prompt, which only the node that computes it has.
    PromptOutputs,
    /// No other node can enforce the request's constraint.
    Constraint,
    /// The answer has begun on a server of no session.
    Resumed,
}

impl StayReason {
    pub const ALL: [Self; 7] = [
        Self::Short,
        Self::SlowLink,
        Self::NoRoom,
        Self::TooSlow,
        Self::PromptOutputs,
        Self::Constraint,
        Self::Resumed,
    ];

    /// Returns the value of the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::SlowLink => "slow_link",
            Self::NoRoom => "no_room",
            Self::TooSlow => "too_slow",
            Self::PromptOutputs => "prompt_outputs",
            Self::Constraint => "constraint",
            Self::Resumed => "resumed",
        }
    }
}

/// A request whose route is to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct RouteQuery<'a> {
    pub session: SessionId,
    pub num_prompt_tokens: u32,
    pub num_expected_output_tokens: u32,
    /// The longest useful time per output token, in microseconds.
    pub max_tpot_us: Option<u64>,
    /// The hashes of the prompt's whole blocks.
    pub hashes: &'a [PageHash],
    /// The number of choices of the prompt. A decode node has no pages yet for choices that wait for the first one.
    pub num_choices: u32,
    /// The reason why the request cannot leave this node, if there is one.
    pub stays: Option<StayReason>,
    /// Nodes that must not be asked again.
    pub tried: &'a [NodeId],
    /// The node of another choice.
    pub sibling: Option<NodeId>,
    /// Whether a node that has a part of the prompt is preferred. False after a fetch.
    pub seeks_holder: bool,
    pub fetching: Fetching,
    /// The state of this node.
    pub here: &'a SchedulerStats,
}

/// Whether this node fetches a prompt's blocks from the decode node that has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetching {
    Never,
    /// Fetches, unless the decode node would compute the rest sooner.
    IfQuicker(FetchPace),
    /// Fetches even if computing is quicker.
    Always,
}

/// The prompt of a session whose decode node has reported how many of the prompt's rows it has.
#[derive(Clone, Copy, Debug)]
pub struct ComputeQuery {
    pub node: NodeId,
    pub num_prompt_tokens: u32,
    pub num_cached_rows: u32,
    pub here: ComputeSite,
    pub fetching: Fetching,
}

/// The node that computes the rest of a prompt, and whether this node fetches blocks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeDecision {
    pub place: ComputePlace,
    pub fetches: bool,
}

impl Directory {
    /// Chooses the route of a request, and counts its pages as taken on the node that decodes it.
    pub fn route(&mut self, query: &RouteQuery<'_>, now_us: u64) -> Route {
        let holder = match query.seeks_holder && query.tried.is_empty() {
            true => self.holder(query.hashes),
            false => None,
        };
        if let Some(holder) = holder
            && self.fetches_from(holder, query, now_us)
        {
            return Route::Fetch(holder);
        }
        if let Some(reason) = query.stays {
            return Route::Here(reason);
        }
        let compute_place = self.config.placement.compute_place;
        let may_ask = query.num_choices == 1
            && query.fetching != Fetching::Always
            && compute_place != Some(ComputePlace::Here);
        let near = holder.filter(|_| may_ask).map(|holder| holder.peer.node);
        match self.place(query, holder, near.or(query.sibling), now_us) {
            Ok(peer) => Route::Session {
                peer,
                asks_first: near == Some(peer.node),
            },
            Err(route) => route,
        }
    }

    /// Whether this node fetches blocks from the holder. Rows that this node sent to the holder are most likely still
    /// here.
    fn fetches_from(&self, holder: Holder, query: &RouteQuery<'_>, now_us: u64) -> bool {
        match query.fetching {
            Fetching::Never => false,
            Fetching::Always => true,
            Fetching::IfQuicker(_) if query.num_choices > 1 => true,
            Fetching::IfQuicker(_) => {
                let asked = ComputeQuery {
                    node: holder.peer.node,
                    num_prompt_tokens: query.num_prompt_tokens,
                    num_cached_rows: holder.num_rows,
                    here: ComputeSite::of(query.here, holder.num_rows),
                    fetching: query.fetching,
                };
                self.decide(&asked, now_us).place == ComputePlace::Here
            }
        }
    }

    /// Chooses a decode node. `near` has rows of the prompt or will have them, and is chosen if it has room.
    fn place(
        &mut self,
        query: &RouteQuery<'_>,
        holder: Option<Holder>,
        near: Option<NodeId>,
        now_us: u64,
    ) -> Result<NodeIncarnation, Route> {
        let wanted = PlacementRequest {
            num_prompt_tokens: query.num_prompt_tokens,
            num_expected_output_tokens: query.num_expected_output_tokens,
            max_tpot_us: query.max_tpot_us,
        };
        // The operator keeps short prompts here. This rule comes before all other rules.
        if wanted.num_prompt_tokens < self.config.placement.disaggregate_min_tokens {
            return Err(Route::Here(StayReason::Short));
        }
        let cursor = self.next_cursor();
        let nodes = self.candidates(holder, now_us);
        let place_as = |wanted: &PlacementRequest, nodes: &[DecodeCandidate], falls_back| {
            let fleet = Fleet {
                nodes,
                falls_back,
                kv_bytes_per_token: self.config.kv_bytes_per_token,
                prefill_us: query.here.prefill_us,
            };
            fleet.place(&self.config.placement, wanted, cursor, query.tried)
        };
        let place = |nodes: &[DecodeCandidate], falls_back| place_as(&wanted, nodes, falls_back);
        // The node that would be chosen if its pace did not matter.
        let too_slow = || {
            let max_us = query.max_tpot_us?;
            let unhurried = PlacementRequest {
                max_tpot_us: None,
                ..wanted
            };
            let Placement::Remote(node) = place_as(&unhurried, &nodes, false) else {
                return None;
            };
            let node = nodes.iter().find(|known| known.peer_id == node)?;
            Some(MissedObjective {
                kind: ObjectiveKind::Tpot,
                expected_us: node.report?.tpot_us,
                objective_us: max_us,
            })
        };
        let falls_back = self.config.falls_back;
        let near: Vec<_> = nodes
            .iter()
            .copied()
            .filter(|node| near == Some(node.peer_id))
            .collect();
        let chosen = match place(&near, falls_back) {
            Placement::Remote(node) => Placement::Remote(node),
            Placement::Local | Placement::Full => place(&nodes, falls_back),
        };
        let node = match chosen {
            Placement::Remote(node) => node,
            Placement::Full => return Err(too_slow().map_or(Route::Refused, Route::TooSlow)),
            // If a decode node would be chosen without the fallback, the reason is that node's slow link.
            Placement::Local => {
                return Err(Route::Here(match place(&nodes, false) {
                    Placement::Remote(_) => StayReason::SlowLink,
                    _ if too_slow().is_some() => StayReason::TooSlow,
                    Placement::Local | Placement::Full => StayReason::NoRoom,
                }));
            }
        };
        let page_size = nodes.iter().find(|known| known.peer_id == node);
        let page_size = page_size.map_or(1, |known| known.page_size);
        let num_pages = wanted.num_pages(page_size).try_into().unwrap_or(u32::MAX);
        let chosen = self.incarnation(node).ok_or(Route::Refused)?;
        self.reserve(query.session, node, num_pages);
        Ok(chosen)
    }

    /// The decode nodes, with the number of rows that the holder has.
    fn candidates(&self, holder: Option<Holder>, now_us: u64) -> Vec<DecodeCandidate> {
        let mut nodes = self.peers.decode_nodes(now_us);
        if let Some(holder) = holder {
            let mut nodes = nodes.iter_mut();
            if let Some(node) = nodes.find(|node| node.peer_id == holder.peer.node) {
                node.num_cached_rows = holder.num_rows;
            }
        }
        nodes
    }

    fn incarnation(&self, node: NodeId) -> Option<NodeIncarnation> {
        let incarnation = self.peers.incarnation(node)?;
        Some(NodeIncarnation {
            node,
            incarnation: Incarnation(incarnation),
        })
    }

    /// Chooses the node that computes the rest of a prompt. The operator may have fixed it.
    pub fn decide(&self, query: &ComputeQuery, now_us: u64) -> ComputeDecision {
        let cost = self.compute_cost(query, now_us);
        let fixed = self.config.placement.compute_place;
        let place = fixed.unwrap_or_else(|| cost.place());
        // Nothing is fetched if the decode node has less than a block more than this node.
        let num_here = query.here.num_cached_rows;
        let has_more = num_here.saturating_add(self.config.page_size) <= query.num_cached_rows;
        ComputeDecision {
            place,
            fetches: place == ComputePlace::Here && has_more && query.fetching != Fetching::Never,
        }
    }

    fn compute_cost(&self, query: &ComputeQuery, now_us: u64) -> ComputeCost {
        let known = self.node(query.node, now_us);
        let report = known.and_then(|node| node.report).unwrap_or_default();
        // The prompt lengths of the waiting requests are unknown: each counts as long as this request's prompt.
        let num_queued_tokens = u64::from(report.num_waiting) * u64::from(query.num_prompt_tokens);
        let num_missing = query
            .num_cached_rows
            .saturating_sub(query.here.num_cached_rows);
        let num_blocks = num_missing / self.config.page_size.max(1);
        ComputeCost {
            num_prompt_tokens: query.num_prompt_tokens,
            here: query.here,
            there: ComputeSite {
                num_cached_rows: query.num_cached_rows,
                num_queued_tokens,
                prefill_us: report.prefill_us,
            },
            fetch_us: match query.fetching {
                Fetching::Never => None,
                Fetching::IfQuicker(pace) => Some(pace.load_us(num_blocks)),
                Fetching::Always => Some(0),
            },
            num_running_there: report.num_running,
            kv_bytes_per_token: self.config.kv_bytes_per_token,
            bandwidth: known.and_then(|node| node.bandwidth),
        }
    }
}
