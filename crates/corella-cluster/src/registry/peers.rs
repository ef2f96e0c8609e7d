//! The nodes that the registry lists: their records, and connections to them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::{NodeId, PeerChange, PeerRecord, PeerStanding, PeerTable, PeerTableConfig};
use tonic::transport::Channel;

use super::NodeRecord;
use crate::clock::Clock;

/// Receives the lists of a registry.
pub trait NodeList: Send + Sync + 'static {
    /// Handles a complete list, without this node.
    fn handle_list(&self, list: Vec<NodeRecord>);

    /// Called when the registry cannot be read.
    fn handle_outage(&self);
}

/// The records of a peer table's peers, and connections to them.
#[derive(Debug, Default)]
pub struct PeerBook {
    /// The registry's last list, by instance id.
    listed: BTreeMap<String, NodeRecord>,
    /// The records of exactly the peers in the table.
    records: BTreeMap<NodeId, NodeRecord>,
    /// Connections to peers in the table.
    channels: BTreeMap<NodeId, Channel>,
    /// The standing that each peer had after the last change.
    standings: BTreeMap<NodeId, PeerStanding>,
}

impl PeerBook {
    /// Stores the registry's list, and returns the list in the form of the peer table.
    pub fn handle_list(&mut self, list: Vec<NodeRecord>) -> Vec<PeerRecord> {
        let records = list.iter().map(NodeRecord::peer_record).collect();
        let listed = list
            .into_iter()
            .map(|record| (record.instance_id.clone(), record));
        self.listed = listed.collect();
        for record in self.records.values_mut() {
            if let Some(newest) = self.listed.get(&record.instance_id) {
                record.clone_from(newest);
            }
        }
        records
    }

    /// Applies the changes of the peer table. Returns the peers that no longer answer, although they have not drained.
    pub fn follow(&mut self, changes: Vec<PeerChange>, table: &PeerTable) -> Vec<NodeId> {
        for change in changes {
            match change {
                PeerChange::Added {
                    instance_id,
                    peer_id,
                } => {
                    tracing::info!("node {instance_id} is listed, and joins when it answers");
                    if let Some(record) = self.listed.get(&instance_id) {
                        self.records.insert(peer_id, record.clone());
                    }
                }
                PeerChange::Restarted {
                    instance_id,
                    old,
                    new,
                } => {
                    if is_answering(self.standings.remove(&old)) {
                        tracing::info!("node {instance_id} was restarted");
                    }
                    let record = self.records.remove(&old);
                    let record = self.listed.get(&instance_id).cloned().or(record);
                    if let Some(record) = record {
                        self.records.insert(new, record);
                    }
                }
                PeerChange::Removed {
                    instance_id,
                    peer_id,
                } => {
                    match is_answering(self.standings.remove(&peer_id)) {
                        true => tracing::info!("node {instance_id} is gone"),
                        false => tracing::info!("node {instance_id} is no longer listed"),
                    }
                    self.records.remove(&peer_id);
                }
            }
        }
        let records = &self.records;
        self.channels
            .retain(|peer_id, _| records.contains_key(peer_id));
        self.note_standings(table)
    }

    fn note_standings(&mut self, table: &PeerTable) -> Vec<NodeId> {
        let mut lost = Vec::new();
        for (&peer_id, record) in &self.records {
            let standing = table.standing(peer_id);
            let before = standing.and_then(|standing| self.standings.insert(peer_id, standing));
            let instance_id = &record.instance_id;
            match (before, standing) {
                _ if is_answering(before) == is_answering(standing) => {}
                (_, Some(PeerStanding::Healthy | PeerStanding::Draining)) => {
                    tracing::info!("node {instance_id} has joined");
                }
                (Some(PeerStanding::Draining), _) => tracing::info!("node {instance_id} is gone"),
                (_, Some(PeerStanding::Suspect)) => lost.push(peer_id),
                // An incompatible peer has its own warning.
                _ => {}
            }
        }
        lost
    }

    pub fn record(&self, peer_id: NodeId) -> Option<&NodeRecord> {
        self.records.get(&peer_id)
    }

    /// Returns all peers, regardless of their health.
    pub fn records(&self) -> &BTreeMap<NodeId, NodeRecord> {
        &self.records
    }

    /// Returns the connection to a peer. The first call makes the connection by `connect`, and later calls reuse it.
    pub fn channel(
        &mut self,
        peer_id: NodeId,
        connect: impl FnOnce(&NodeRecord) -> Option<Channel>,
    ) -> Option<Channel> {
        if let Some(channel) = self.channels.get(&peer_id) {
            return Some(channel.clone());
        }
        let channel = connect(self.records.get(&peer_id)?)?;
        self.channels.insert(peer_id, channel.clone());
        Some(channel)
    }
}

fn is_answering(standing: Option<PeerStanding>) -> bool {
    matches!(
        standing,
        Some(PeerStanding::Healthy | PeerStanding::Draining)
    )
}

/// The peers of a node that sends no requests to them.
#[derive(Debug)]
pub struct Peers {
    clock: Clock,
    state: Mutex<(PeerTable, PeerBook)>,
}

impl Peers {
    pub fn new(config: PeerTableConfig) -> Self {
        Self {
            clock: Clock::start(),
            state: Mutex::new((PeerTable::new(config), PeerBook::default())),
        }
    }

    /// Gives access to the table, together with the present time on its clock.
    pub fn with<T>(&self, act: impl FnOnce(&mut PeerTable, u64) -> T) -> T {
        let (table, book) = &mut *self.lock();
        let outcome = act(table, self.clock.now_us());
        book.follow(std::iter::from_fn(|| table.poll_change()).collect(), table);
        outcome
    }

    /// Returns all peers, regardless of their health.
    pub fn records(&self) -> Vec<(NodeId, NodeRecord)> {
        let (_, book) = &*self.lock();
        let records = book.records().iter();
        records
            .map(|(&peer_id, record)| (peer_id, record.clone()))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, (PeerTable, PeerBook)> {
        // A panic in one request must not end all others.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeList for Peers {
    fn handle_list(&self, list: Vec<NodeRecord>) {
        let records = self.lock().1.handle_list(list);
        self.with(|table, now_us| table.handle_list(&records, now_us));
    }

    fn handle_outage(&self) {
        self.with(|table, now_us| table.handle_outage(now_us));
    }
}

#[cfg(test)]
mod tests {
    use corella_core::{LoadReport, PeerFacts};

    use super::*;

    /// A table of the two peers `a:1` and `b:1`, and their book.
    struct Pair {
        table: PeerTable,
        book: PeerBook,
    }

    impl Pair {
        fn new() -> Self {
            let config = PeerTableConfig {
                max_failed_probes: 1,
                ..PeerTableConfig::default()
            };
            let mut pair = Self {
                table: PeerTable::new(config),
                book: PeerBook::default(),
            };
            let list = ["a:1", "b:1"].map(|address| NodeRecord::at(address, address));
            let records = pair.book.handle_list(list.into());
            pair.table.handle_list(&records, 0);
            pair
        }

        fn peer_id(&self) -> NodeId {
            self.table.peer_id("b:1").expect("it is listed")
        }

        fn answer(&mut self, incarnation: u64) {
            let facts = PeerFacts {
                incarnation,
                page_size: 16,
            };
            self.table.handle_hello(self.peer_id(), facts, 0);
        }

        /// The addresses of the peers that were lost since the last call.
        fn lost(&mut self) -> Vec<String> {
            let changes = std::iter::from_fn(|| self.table.poll_change()).collect();
            let lost = self.book.follow(changes, &self.table).into_iter();
            let record = |peer_id| self.book.record(peer_id).expect("it is listed");
            lost.map(|peer_id| record(peer_id).session_address.clone())
                .collect()
        }
    }

    #[test]
    fn a_peer_that_has_answered_is_lost_once() {
        let mut pair = Pair::new();
        let none = [""; 0];
        assert_eq!(pair.lost(), none);
        // A list of fixed addresses also names nodes that are not running.
        pair.table.handle_silent(pair.peer_id(), 0);
        assert_eq!(pair.lost(), none);
        for incarnation in [1, 2] {
            pair.answer(incarnation);
            assert_eq!(pair.lost(), none);
            for expected in [&["b:1"] as &[_], &[]] {
                pair.table.handle_silent(pair.peer_id(), 0);
                assert_eq!(pair.lost(), expected);
            }
        }
    }

    #[test]
    fn a_restart_and_a_drained_peer_are_no_losses() {
        let mut pair = Pair::new();
        for incarnation in [1, 2] {
            pair.answer(incarnation);
            assert_eq!(pair.lost(), [""; 0]);
        }
        let report = LoadReport {
            is_draining: true,
            ..LoadReport::default()
        };
        pair.table.handle_report(pair.peer_id(), report, 0);
        assert_eq!(pair.lost(), [""; 0]);
        pair.table.handle_silent(pair.peer_id(), 0);
        assert_eq!(pair.lost(), [""; 0]);
    }
}
