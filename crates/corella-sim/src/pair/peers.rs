//! The peers of a prefill node: their ids in the simulated network, and their answers to probes.

use std::collections::BTreeMap;

use corella_core::{NodeId, PeerChange, PeerFacts, PeerRecord, PrefillNode};

use crate::pair::fleet_plan::Answer;

/// Maps the directory's ids to the network's. The directory numbers incarnations in the order of discovery, and the
/// network numbers nodes from 0 on.
pub struct SimulatedPeers {
    until_us: u64,
    /// The network's id of each peer. Peers that have left stay, because late messages name them.
    places: BTreeMap<NodeId, NodeId>,
}

impl SimulatedPeers {
    /// Makes an empty map. Peers are probed until `until_us`.
    pub fn new(until_us: u64) -> Self {
        Self {
            until_us,
            places: BTreeMap::new(),
        }
    }

    /// Handles the registry's list, or `None` if the registry fails.
    pub fn handle_list(
        &mut self,
        node: &mut PrefillNode,
        records: Option<&[PeerRecord]>,
        now_us: u64,
    ) {
        match records {
            Some(records) => node.peers().handle_list(records, now_us),
            None => node.peers().handle_outage(now_us),
        }
        self.follow_changes(node, now_us);
    }

    /// Returns the time of the next probe.
    pub fn next_probe_us(&self, node: &PrefillNode) -> Option<u64> {
        let next_us = node.directory().peers.next_probe_us()?;
        (next_us < self.until_us).then_some(next_us)
    }

    /// Returns a peer to probe, and its id in the network.
    pub fn poll_probe(&mut self, node: &mut PrefillNode, now_us: u64) -> Option<(NodeId, NodeId)> {
        if now_us >= self.until_us {
            return None;
        }
        let peer = node.peers().poll_probe(now_us)?;
        Some((peer, self.place(peer)))
    }

    /// Handles a node's answer to a probe, or `None` if it was late.
    pub fn handle_answer(
        &mut self,
        node: &mut PrefillNode,
        peer: NodeId,
        answer: Option<Answer>,
        now_us: u64,
    ) {
        let table = node.peers();
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
        self.follow_changes(node, now_us);
    }

    pub fn follow_changes(&mut self, node: &mut PrefillNode, now_us: u64) {
        while let Some(change) = node.poll_change(now_us) {
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

    /// Returns the name of a node in the registry.
    pub fn instance(place: NodeId) -> String {
        place.0.to_string()
    }

    pub fn place(&self, peer: NodeId) -> NodeId {
        self.places[&peer]
    }
}
