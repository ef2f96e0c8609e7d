//! The other nodes: listed by the registry, probed, and judged by the sessions with them.
//!
//! The registry lists the nodes, and the nodes report their state. A failing registry removes no node. After a registry
//! has restarted without its data, nodes that are missing from its lists are kept for a while, so that they can
//! register again. A restarted node is another peer, so that no message for its earlier incarnation reaches it.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use crate::fleet::peer::{Peer, PeerFacts, ReservationId};
use crate::{DecodeCandidate, LoadReport, NodeId, PeerStanding};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTableConfig {
    pub max_peers: usize,
    pub probe_interval_us: u64,
    /// The number of successive probes without an answer that makes a healthy node suspect.
    pub max_failed_probes: u32,
    /// The first and the longest pause before the next probe of a suspect node.
    pub min_retry_us: u64,
    pub max_retry_us: u64,
    /// The time between two probes of an incompatible node, which changes only by a restart.
    pub incompatible_interval_us: u64,
    /// Empty lists of the registry are believed after this number of them in a row, with at least `empty_lists_us`
    /// between the first and the last.
    pub num_empty_lists: u32,
    pub empty_lists_us: u64,
    /// After an outage a healthy node may be missing from the list because it has not registered again yet. The node is
    /// kept for this time.
    pub outage_grace_us: u64,
    pub bandwidth_lifetime_us: u64,
    /// The least time between two log lines about one incompatible node.
    pub log_interval_us: u64,
}

impl Default for PeerTableConfig {
    fn default() -> Self {
        Self {
            max_peers: 4096,
            probe_interval_us: 1_000_000,
            max_failed_probes: 2,
            min_retry_us: 250_000,
            max_retry_us: 5_000_000,
            incompatible_interval_us: 60_000_000,
            num_empty_lists: 2,
            empty_lists_us: 1_000_000,
            outage_grace_us: 15_000_000,
            bandwidth_lifetime_us: 60_000_000,
            log_interval_us: 60_000_000,
        }
    }
}

/// A node's entry in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRecord {
    /// The id of the node, which a restart does not change.
    pub instance_id: String,
    /// `None` from a registry that lists only addresses. The node's own answer then gives the incarnation.
    pub incarnation: Option<u64>,
    pub max_prompt_tokens: u32,
    pub is_draining: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerChange {
    Added {
        instance_id: String,
        peer_id: NodeId,
    },
    /// The node was restarted: all sessions and loads of its earlier incarnation have ended.
    Restarted {
        instance_id: String,
        old: NodeId,
        new: NodeId,
    },
    Removed {
        instance_id: String,
        peer_id: NodeId,
    },
}

#[derive(Clone, Debug, Default)]
pub struct PeerTable {
    config: PeerTableConfig,
    peers: BTreeMap<NodeId, Peer>,
    by_instance: BTreeMap<String, Instance>,
    next_peer: u32,
    /// The time of the first list in the current run of empty lists, and the number of lists in that run.
    empty_lists: Option<(u64, u32)>,
    last_outage_us: Option<u64>,
    /// Changes that `poll_change` has not returned yet.
    changes: VecDeque<PeerChange>,
}

/// The part of a node's state that outlives a restart.
#[derive(Clone, Debug)]
struct Instance {
    peer_id: NodeId,
    last_log_us: Option<u64>,
}

impl PeerTable {
    pub fn new(config: PeerTableConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// The next change: a node was added, removed or restarted. After each `handle_*`, call this until it returns
    /// `None`.
    pub fn poll_change(&mut self) -> Option<PeerChange> {
        self.changes.pop_front()
    }

    /// Handles a list of a working registry. Lists must be repeated every few seconds even without changes, because
    /// some changes are believed only once a later list confirms them.
    pub fn handle_list(&mut self, records: &[PeerRecord], now_us: u64) {
        if !records.is_empty() {
            self.empty_lists = None;
        } else if !self.is_emptiness_confirmed(now_us) {
            return;
        }
        let mut listed: BTreeMap<&str, &PeerRecord> = BTreeMap::new();
        for record in records {
            if listed.len() < self.config.max_peers {
                listed.entry(&record.instance_id).or_insert(record);
            }
        }
        self.remove_unlisted(&listed, now_us);
        for record in listed.into_values() {
            self.handle_record(record, now_us);
        }
    }

    fn is_emptiness_confirmed(&mut self, now_us: u64) -> bool {
        let (first_us, num_lists) = self.empty_lists.unwrap_or((now_us, 0));
        let num_lists = num_lists.saturating_add(1);
        self.empty_lists = Some((first_us, num_lists));
        num_lists >= self.config.num_empty_lists
            && now_us.saturating_sub(first_us) >= self.config.empty_lists_us
    }

    fn remove_unlisted(&mut self, listed: &BTreeMap<&str, &PeerRecord>, now_us: u64) {
        let grace_us = self.config.outage_grace_us;
        let is_recovering = self
            .last_outage_us
            .is_some_and(|outage_us| now_us.saturating_sub(outage_us) < grace_us);
        self.peers.retain(|&peer_id, peer| {
            let instance_id = &peer.record.instance_id;
            let is_kept = listed.contains_key(instance_id.as_str())
                || is_recovering && peer.standing() == PeerStanding::Healthy;
            if !is_kept {
                self.by_instance.remove(instance_id);
                self.changes.push_back(PeerChange::Removed {
                    instance_id: instance_id.clone(),
                    peer_id,
                });
            }
            is_kept
        });
    }

    fn handle_record(&mut self, record: &PeerRecord, now_us: u64) {
        let Some(peer_id) = self.peer_id(&record.instance_id) else {
            if self.peers.len() < self.config.max_peers {
                let peer_id = self.insert(record.clone(), now_us);
                self.changes.push_back(PeerChange::Added {
                    instance_id: record.instance_id.clone(),
                    peer_id,
                });
            }
            return;
        };
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        // The node's own answer is newer than an unchanged record.
        let is_news = record.incarnation != peer.record.incarnation;
        let is_other_life = match (record.incarnation, peer.incarnation) {
            (Some(listed), Some(known)) => listed != known,
            _ => false,
        };
        if is_news && is_other_life {
            self.restart(peer_id, record.clone(), now_us);
        } else {
            peer.incarnation = peer.incarnation.or(record.incarnation);
            peer.record = record.clone();
        }
    }

    fn insert(&mut self, record: PeerRecord, now_us: u64) -> NodeId {
        let peer_id = NodeId(self.next_peer);
        self.next_peer += 1;
        let instance_id = record.instance_id.clone();
        let peer = Peer::new(record, now_us, &self.config);
        self.peers.insert(peer_id, peer);
        self.by_instance
            .entry(instance_id)
            .and_modify(|instance| instance.peer_id = peer_id)
            .or_insert(Instance {
                peer_id,
                last_log_us: None,
            });
        peer_id
    }

    fn restart(&mut self, old: NodeId, record: PeerRecord, now_us: u64) -> NodeId {
        self.peers.remove(&old);
        let instance_id = record.instance_id.clone();
        let new = self.insert(record, now_us);
        self.changes.push_back(PeerChange::Restarted {
            instance_id,
            old,
            new,
        });
        new
    }

    /// Keeps all nodes while the registry does not answer.
    pub fn handle_outage(&mut self, now_us: u64) {
        self.last_outage_us = Some(now_us);
        self.empty_lists = None;
    }

    /// Returns a node to probe now. The node's next probe is due later, with or without an answer.
    pub fn poll_probe(&mut self, now_us: u64) -> Option<NodeId> {
        let due = self
            .peers
            .iter_mut()
            .min_by_key(|(_, peer)| peer.next_probe_us);
        let (&peer_id, peer) = due.filter(|(_, peer)| peer.next_probe_us <= now_us)?;
        peer.next_probe_us = now_us + peer.probe_interval_us(&self.config);
        Some(peer_id)
    }

    pub fn next_probe_us(&self) -> Option<u64> {
        self.peers.values().map(|peer| peer.next_probe_us).min()
    }

    /// Handles a node's answer to a probe or to the opening of a session. Returns the incarnation that has answered:
    /// after a restart, it differs from the one asked.
    pub fn handle_hello(
        &mut self,
        peer_id: NodeId,
        hello: PeerFacts,
        now_us: u64,
    ) -> Option<NodeId> {
        let peer_id = self.identify(peer_id, hello.incarnation, now_us)?;
        let peer = self.peers.get_mut(&peer_id)?;
        peer.handle_hello(hello);
        peer.next_probe_us = now_us + self.config.probe_interval_us;
        Some(peer_id)
    }

    /// Handles the answer of an incompatible node. Returns whether to log it now.
    pub fn handle_incompatible(&mut self, peer_id: NodeId, incarnation: u64, now_us: u64) -> bool {
        let peer_id = self.identify(peer_id, incarnation, now_us);
        let Some(peer) = peer_id.and_then(|peer_id| self.peers.get_mut(&peer_id)) else {
            return false;
        };
        peer.handle_incompatible(now_us, &self.config);
        let Some(instance) = self.by_instance.get_mut(&peer.record.instance_id) else {
            return false;
        };
        let is_due = instance
            .last_log_us
            .is_none_or(|last_us| now_us.saturating_sub(last_us) >= self.config.log_interval_us);
        if is_due {
            instance.last_log_us = Some(now_us);
        }
        is_due
    }

    /// The peer with the incarnation that a node has given; `None` if the table no longer has the peer that was asked.
    fn identify(&mut self, peer_id: NodeId, incarnation: u64, now_us: u64) -> Option<NodeId> {
        let peer = self.peers.get_mut(&peer_id)?;
        let known = *peer.incarnation.get_or_insert(incarnation);
        if known == incarnation {
            return Some(peer_id);
        }
        let record = peer.record.clone();
        let new = self.restart(peer_id, record, now_us);
        self.peers.get_mut(&new)?.incarnation = Some(incarnation);
        Some(new)
    }

    /// Handles a probe without an answer in time.
    pub fn handle_silent(&mut self, peer_id: NodeId, now_us: u64) {
        if let Some(peer) = self.peers.get_mut(&peer_id) {
            peer.handle_silent(now_us, &self.config);
        }
    }

    /// Handles the loss of a session: its stream was reset, or its heartbeats ceased.
    pub fn handle_session_lost(&mut self, peer_id: NodeId, now_us: u64) {
        if let Some(peer) = self.peers.get_mut(&peer_id) {
            peer.suspect(now_us, &self.config);
        }
    }

    pub fn handle_report(&mut self, peer_id: NodeId, report: LoadReport, now_us: u64) {
        if let Some(peer) = self.peers.get_mut(&peer_id) {
            peer.handle_report(report, now_us);
        }
    }

    /// Handles a transfer of bytes to a node. `elapsed_ns` leaves out the time in which layers were still being
    /// computed. Returns the bandwidth if it was unknown before.
    pub fn handle_transfer(
        &mut self,
        peer_id: NodeId,
        num_bytes: u64,
        elapsed_ns: u64,
        now_us: u64,
    ) -> Option<u64> {
        let peer = self.peers.get_mut(&peer_id)?;
        let was_unknown = peer.handle_transfer(num_bytes, elapsed_ns, now_us, &self.config);
        was_unknown.then(|| peer.bandwidth())
    }

    /// Counts pages as taken before the node reports them. Call this when a session asks for pages, and
    /// [`release`](Self::release) when the session is refused or ends.
    pub fn reserve(&mut self, peer_id: NodeId, num_pages: u32) -> Option<ReservationId> {
        let number = self.peers.get_mut(&peer_id)?.reserve(num_pages);
        Some(ReservationId { peer_id, number })
    }

    /// Handles the grant of a reservation: the `granted_as`-th of the node since its start, counted from 1.
    pub fn handle_granted(&mut self, reservation: ReservationId, granted_as: u64) {
        if let Some(peer) = self.peers.get_mut(&reservation.peer_id) {
            peer.handle_granted(reservation.number, granted_as);
        }
    }

    pub fn release(&mut self, reservation: ReservationId) {
        if let Some(peer) = self.peers.get_mut(&reservation.peer_id) {
            peer.release(reservation.number);
        }
    }

    /// All nodes as placement sees them, in the order in which they became known.
    pub fn decode_nodes(&self, now_us: u64) -> Vec<DecodeCandidate> {
        self.peers
            .iter()
            .map(|(&peer_id, peer)| peer.decode_node(peer_id, now_us, &self.config))
            .collect()
    }

    pub fn standing(&self, peer_id: NodeId) -> Option<PeerStanding> {
        Some(self.peers.get(&peer_id)?.standing())
    }

    pub fn incarnation(&self, peer_id: NodeId) -> Option<u64> {
        self.peers.get(&peer_id)?.incarnation
    }

    /// The present incarnation of the node with this instance id.
    pub fn peer_id(&self, instance_id: &str) -> Option<NodeId> {
        Some(self.by_instance.get(instance_id)?.peer_id)
    }
}
