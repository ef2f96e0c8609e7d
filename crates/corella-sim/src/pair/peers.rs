//! The directory of a prefill node, and the places of its peers in the simulated network.

use std::collections::BTreeMap;

use corella_core::{Directory, DirectoryConfig, NodeId, PeerChange, PeerFacts, PeerRecord};

use crate::pair::fleet_plan::{Answer, FleetPlan};

/// The network numbers nodes from 0. A directory numbers incarnations as it meets them.
pub struct Peers {
    pub directory: Directory,
    until_us: u64,
    /// The network's number of each peer, also of those that have left: late messages name them.
    places: BTreeMap<NodeId, NodeId>,
}

impl Peers {
    pub fn new(plan: &FleetPlan, page_size: u32, takes_locally: bool) -> Self {
        Self {
            directory: Directory::new(DirectoryConfig {
                peer_table: plan.peer_table.clone(),
                placement: plan.placement.clone(),
                takes_locally,
                page_size,
                kv_bytes_per_token: plan.kv_bytes_per_token,
                max_sent: plan.max_sent,
                first_cursor: 0,
            }),
            until_us: plan.until_us,
            places: BTreeMap::new(),
        }
    }

    /// Takes in the registry's list, or `None` if it cannot be asked.
    pub fn handle_list(&mut self, records: Option<&[PeerRecord]>, now_us: u64) {
        match records {
            Some(records) => self.directory.peers.handle_list(records, now_us),
            None => self.directory.peers.handle_outage(now_us),
        }
        self.follow_changes();
    }

    /// The time of the next probe.
    pub fn next_probe_us(&self) -> Option<u64> {
        let next_us = self.directory.peers.next_probe_us()?;
        (next_us < self.until_us).then_some(next_us)
    }

    /// A peer to probe, and its place.
    pub fn poll_probe(&mut self, now_us: u64) -> Option<(NodeId, NodeId)> {
        if now_us >= self.until_us {
            return None;
        }
        let peer = self.directory.peers.poll_probe(now_us)?;
        Some((peer, self.place(peer)))
    }

    /// Takes in a node's answer to a probe, or `None` if it has not come in time.
    pub fn handle_answer(&mut self, peer: NodeId, answer: Option<Answer>, now_us: u64) {
        let table = &mut self.directory.peers;
        let Some(answer) = answer else {
            return table.handle_silent(peer, now_us);
        };
        if !answer.is_compatible {
            table.handle_incompatible(peer, answer.incarnation, now_us);
        } else {
            let facts = PeerFacts {
                incarnation: answer.incarnation,
                page_size: answer.page_size,
            };
            if let Some(peer) = table.handle_hello(peer, facts, now_us) {
                table.handle_report(peer, answer.report, now_us);
            }
        }
        self.follow_changes();
    }

    pub fn handle_incompatible(&mut self, peer: NodeId, now_us: u64) {
        let table = &mut self.directory.peers;
        if let Some(incarnation) = table.incarnation(peer) {
            table.handle_incompatible(peer, incarnation, now_us);
            self.follow_changes();
        }
    }

    fn follow_changes(&mut self) {
        while let Some(change) = self.directory.peers.poll_change() {
            match change {
                PeerChange::Added {
                    instance_id,
                    peer_id,
                } => {
                    let place = instance_id.parse().expect("instances are named by numbers");
                    self.places.insert(peer_id, NodeId(place));
                }
                PeerChange::Restarted { old, new, .. } => {
                    self.places.insert(new, self.place(old));
                }
                PeerChange::Removed { .. } => {}
            }
        }
    }

    /// The name of a node in the registry.
    pub fn instance(place: NodeId) -> String {
        place.0.to_string()
    }

    pub fn place(&self, peer: NodeId) -> NodeId {
        self.places[&peer]
    }

    /// All incarnations that were met at a place.
    pub fn met_at(&self, place: NodeId) -> impl Iterator<Item = NodeId> {
        let places = self.places.iter();
        places.filter_map(move |(&peer, &of)| (of == place).then_some(peer))
    }

    /// Reservations that were left behind when all sessions had ended.
    pub fn leftovers(&self) -> String {
        let nodes = self.directory.peers.decode_nodes(0);
        let num_pages: u32 = nodes.iter().map(|node| node.num_unreported_pages).sum();
        let num_reservations = self.directory.num_reservations();
        match num_pages == 0 && num_reservations == 0 {
            true => String::new(),
            false => format!("{num_pages} pages, {num_reservations} reservations"),
        }
    }
}
