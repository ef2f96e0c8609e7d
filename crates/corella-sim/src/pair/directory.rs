//! What a prefill node knows of the decode nodes: who there is, how they are, and which of them has the beginning of a
//! prompt.

use std::collections::BTreeMap;

use corella_core::session::Peer;
use corella_core::{
    BlockHasher, BlockSourceMap, ComputeCost, ComputePlace, ComputeSite, DecodeNode, Fleet,
    Incarnation, NodeId, PeerChange, PeerFacts, PeerId, PeerRecord, PeerTable, Placement,
    PlacementRequest, Request, ReservationId, SessionId,
};

use crate::pair::fleet_plan::{Answer, FleetPlan};

pub struct Directory {
    plan: FleetPlan,
    hasher: BlockHasher,
    page_size: u32,
    /// Whether this node may decode requests itself.
    falls_back: bool,
    table: PeerTable,
    nodes: BTreeMap<PeerId, NodeId>,
    sent: BlockSourceMap,
    /// What each session has asked a node for, or has there.
    reservations: BTreeMap<SessionId, (NodeId, ReservationId)>,
    /// Where the first choice of a prompt goes.
    choices: BTreeMap<SessionId, NodeId>,
    cursor: u64,
}

/// A node that is said to have the beginning of a prompt.
#[derive(Clone, Copy)]
pub struct Holder {
    pub peer: Peer,
    pub num_rows: u32,
}

/// A request that looks for a decode node.
pub struct Search<'a> {
    pub session: SessionId,
    pub request: &'a Request,
    pub tried: &'a [NodeId],
    /// A node that has a part of the prompt.
    pub near: Option<NodeId>,
    pub siblings: Option<SessionId>,
    pub prefill_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Peer(Peer),
    Here,
    Nobody,
}

impl Directory {
    pub fn new(plan: &FleetPlan, hasher: &BlockHasher, page_size: u32, falls_back: bool) -> Self {
        Self {
            hasher: *hasher,
            page_size,
            falls_back,
            table: PeerTable::new(plan.peer_table.clone()),
            nodes: BTreeMap::new(),
            sent: BlockSourceMap::new(plan.max_sent),
            reservations: BTreeMap::new(),
            choices: BTreeMap::new(),
            cursor: 0,
            plan: plan.clone(),
        }
    }

    /// The registry's list, or `None` if it cannot be asked.
    pub fn handle_list(&mut self, records: Option<&[PeerRecord]>, now_us: u64) {
        match records {
            Some(records) => self.table.handle_list(records, now_us),
            None => self.table.handle_outage(now_us),
        }
        self.follow_changes();
    }

    /// When a node is to be probed.
    pub fn next_probe_us(&self) -> Option<u64> {
        let next_us = self.table.next_probe_us()?;
        (next_us < self.plan.until_us).then_some(next_us)
    }

    pub fn poll_probe(&mut self, now_us: u64) -> Option<(PeerId, NodeId)> {
        if now_us >= self.plan.until_us {
            return None;
        }
        let peer = self.table.poll_probe(now_us)?;
        Some((peer, self.nodes[&peer]))
    }

    /// A node's answer to a probe, or `None` if it has not come in time.
    pub fn handle_answer(&mut self, peer: PeerId, answer: Option<Answer>, now_us: u64) {
        let Some(answer) = answer else {
            self.table.handle_silent(peer, now_us);
            return;
        };
        if !answer.is_compatible {
            self.table
                .handle_incompatible(peer, answer.incarnation, now_us);
        } else {
            let facts = PeerFacts {
                incarnation: answer.incarnation,
                page_size: answer.page_size,
            };
            if let Some(peer) = self.table.handle_hello(peer, facts, now_us) {
                self.table.handle_report(peer, answer.report, now_us);
            }
        }
        self.follow_changes();
    }

    fn follow_changes(&mut self) {
        while let Some(change) = self.table.poll_change() {
            match change {
                PeerChange::Added {
                    instance_id,
                    peer_id,
                } => {
                    let node = instance_id.parse().expect("instances are named by numbers");
                    self.nodes.insert(peer_id, NodeId(node));
                }
                PeerChange::Restarted { old, new, .. } => {
                    if let Some(node) = self.nodes.remove(&old) {
                        self.nodes.insert(new, node);
                    }
                }
                PeerChange::Removed { peer_id, .. } => {
                    self.nodes.remove(&peer_id);
                }
            }
        }
    }

    /// The name of a node in the registry.
    pub fn instance(node: NodeId) -> String {
        node.0.to_string()
    }

    fn peer_id(&self, node: NodeId) -> Option<PeerId> {
        self.table.peer_id(&Self::instance(node))
    }

    /// Chooses a decode node, the one that has a part of the prompt before others, and counts its pages as taken.
    pub fn place(&mut self, search: &Search<'_>, now_us: u64) -> Choice {
        let wanted = PlacementRequest {
            num_prompt_tokens: search.request.prompt.len() as u32,
            num_expected_output_tokens: search.request.stopping.max_tokens.unwrap_or(0),
        };
        let config = &self.plan.placement;
        if wanted.num_prompt_tokens < config.disaggregate_min_tokens {
            return Choice::Here;
        }
        let first = { search.siblings }.and_then(|first| self.choices.get(&first).copied());
        let near = search.near.or(first).and_then(|node| self.peer_id(node));
        let tried = search.tried.iter().filter_map(|&node| self.peer_id(node));
        let refused: Vec<_> = tried.collect();
        self.cursor += 1;
        let nodes = self.table.decode_nodes(now_us);
        let place = |nodes: &[DecodeNode]| {
            let fleet = Fleet {
                nodes,
                takes_locally: self.falls_back,
                kv_bytes_per_token: self.plan.kv_bytes_per_token,
                prefill_us: search.prefill_us,
            };
            fleet.place(config, &wanted, self.cursor, &refused)
        };
        let near = { nodes.iter() }.find(|node| Some(node.peer_id) == near);
        let near = near.map(|node| place(std::slice::from_ref(node)));
        let near = near.filter(|placement| matches!(placement, Placement::Remote(_)));
        let peer_id = match near.unwrap_or_else(|| place(&nodes)) {
            Placement::Remote(peer_id) => peer_id,
            Placement::Local => return Choice::Here,
            Placement::Full => return Choice::Nobody,
        };
        let Some(incarnation) = self.table.incarnation(peer_id) else {
            return Choice::Nobody;
        };
        let node = self.nodes[&peer_id];
        let num_pages = wanted.num_pages(self.page_size) as u32;
        if let Some(reservation) = self.table.reserve(peer_id, num_pages) {
            let earlier = self
                .reservations
                .insert(search.session, (node, reservation));
            self.release(earlier);
        }
        if let Some(first) = search.siblings {
            self.choices.entry(first).or_insert(node);
        }
        Choice::Peer(Peer {
            node,
            incarnation: Incarnation(incarnation),
        })
    }

    fn release(&mut self, reservation: Option<(NodeId, ReservationId)>) {
        if let Some((_, reservation)) = reservation {
            self.table.release(reservation);
        }
    }

    /// Forgets the node that was chosen last for the session.
    pub fn handle_left(&mut self, session: SessionId) {
        let reservation = self.reservations.remove(&session);
        self.release(reservation);
    }

    /// A node has pages for a session, and is about to have the rows of its prompt.
    pub fn handle_allocated(
        &mut self,
        session: SessionId,
        request: &Request,
        peer: Peer,
        granted_as: Option<u64>,
    ) {
        let Request {
            namespace, prompt, ..
        } = request;
        let hashes = self.hasher.hashes(namespace, prompt, self.page_size);
        if let Some(last) = hashes.last() {
            self.sent.note(last, peer.node, peer.incarnation);
        }
        if let Some(granted_as) = granted_as
            && let Some(&(node, reservation)) = self.reservations.get(&session)
            && node == peer.node
        {
            self.table.handle_granted(reservation, granted_as);
        }
    }

    pub fn handle_transfer(&mut self, node: NodeId, num_rows: u32, elapsed_us: u64, now_us: u64) {
        let num_bytes = u64::from(num_rows) * self.plan.kv_bytes_per_token;
        if let Some(peer_id) = self.peer_id(node) {
            self.table
                .handle_transfer(peer_id, num_bytes, elapsed_us * 1000, now_us);
        }
    }

    pub fn mark_suspect(&mut self, node: NodeId, now_us: u64) {
        if let Some(peer_id) = self.peer_id(node) {
            self.table.handle_session_lost(peer_id, now_us);
        }
    }

    pub fn mark_incompatible(&mut self, node: NodeId, now_us: u64) {
        if let Some(peer_id) = self.peer_id(node)
            && let Some(incarnation) = self.table.incarnation(peer_id)
        {
            self.table.handle_incompatible(peer_id, incarnation, now_us);
            self.follow_changes();
        }
    }

    /// The node that has the most of a prompt, as far as is known.
    pub fn holder(&mut self, request: &Request) -> Option<Holder> {
        let Request {
            namespace, prompt, ..
        } = request;
        let hashes = self.hasher.hashes(namespace, prompt, self.page_size);
        let hashes: Vec<_> = hashes.collect();
        let site = self.sent.find(&hashes)?;
        // A node that was started again has nothing of before.
        let peer_id = self.peer_id(site.node)?;
        if self.table.incarnation(peer_id) != Some(site.incarnation.0) {
            return None;
        }
        Some(Holder {
            peer: Peer {
                node: site.node,
                incarnation: site.incarnation,
            },
            num_rows: site.num_blocks * self.page_size,
        })
    }

    /// Which node computes a prompt of which `node` has a part.
    pub fn compute_place(
        &self,
        node: NodeId,
        num_prompt_tokens: u32,
        num_cached_rows: u32,
        here: ComputeSite,
        now_us: u64,
    ) -> ComputePlace {
        let peer_id = self.peer_id(node);
        let facts = self.table.decode_nodes(now_us);
        let facts = facts.iter().find(|facts| Some(facts.peer_id) == peer_id);
        let report = facts.and_then(|facts| facts.report).unwrap_or_default();
        let bandwidth = facts.and_then(|facts| facts.bandwidth);
        let num_missing = num_cached_rows.saturating_sub(here.num_cached_rows);
        let num_bytes = u64::from(num_missing) * self.plan.kv_bytes_per_token;
        let cost = ComputeCost {
            num_prompt_tokens,
            here,
            there: ComputeSite {
                num_cached_rows,
                num_queued_tokens: u64::from(report.num_waiting) * u64::from(num_prompt_tokens),
                prefill_us: report.prefill_us,
            },
            // Rows are fetched over the link that they are sent by.
            fetch_us: bandwidth.map(|bandwidth| num_bytes * 1_000_000 / bandwidth.max(1)),
            num_running_there: report.num_running,
            kv_bytes_per_token: self.plan.kv_bytes_per_token,
            bandwidth,
        };
        cost.place()
    }

    /// Reservations and choices that were left behind when all sessions had ended.
    pub fn leftovers(&self) -> String {
        let nodes = self.table.decode_nodes(0);
        let num_pages: u32 = nodes.iter().map(|node| node.num_unreported_pages).sum();
        match num_pages == 0 && self.reservations.is_empty() {
            true => String::new(),
            false => format!("{num_pages} pages, {:?}", self.reservations),
        }
    }
}
