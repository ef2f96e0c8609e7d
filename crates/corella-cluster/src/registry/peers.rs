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

    /// Handles that the registry cannot be read.
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
    /// Listed peers that have not answered yet. A list of addresses also names nodes that are not running.
    unreached: BTreeMap<NodeId, String>,
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

    /// Applies the changes of the peer table.
    pub fn follow(&mut self, changes: Vec<PeerChange>, table: &PeerTable) {
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
                    self.unreached.insert(peer_id, instance_id);
                }
                PeerChange::Restarted {
                    instance_id,
                    old,
                    new,
                } => {
                    match self.unreached.remove(&old) {
                        None => tracing::info!("node {instance_id} was restarted"),
                        Some(_) => {
                            self.unreached.insert(new, instance_id.clone());
                        }
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
                    match self.unreached.remove(&peer_id) {
                        None => tracing::info!("node {instance_id} is gone"),
                        Some(_) => tracing::info!("node {instance_id} is no longer listed"),
                    }
                    self.records.remove(&peer_id);
                }
            }
        }
        let standing = |peer_id: &NodeId| table.standing(*peer_id);
        self.unreached
            .retain(|peer_id, instance_id| match standing(peer_id) {
                Some(PeerStanding::Healthy | PeerStanding::Draining) => {
                    tracing::info!("node {instance_id} has joined");
                    false
                }
                // An incompatible peer has its own warning.
                Some(PeerStanding::Suspect | PeerStanding::Incompatible) => true,
                None => false,
            });
        let records = &self.records;
        self.channels
            .retain(|peer_id, _| records.contains_key(peer_id));
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
    use corella_core::PeerFacts;

    use super::*;

    fn unreached(peers: &Peers) -> Vec<String> {
        peers.lock().1.unreached.values().cloned().collect()
    }

    fn answer(peers: &Peers, name: &str, incarnation: u64) {
        let facts = PeerFacts {
            incarnation,
            page_size: 16,
        };
        peers.with(|table, now_us| {
            let peer_id = table.peer_id(name).expect("it is listed");
            table.handle_hello(peer_id, facts, now_us);
        });
    }

    /// A list of fixed addresses also names nodes that are not running.
    #[test]
    fn a_node_joins_when_it_answers() {
        let peers = Peers::new(PeerTableConfig::default());
        let list = || ["a:1", "b:1"].map(|address| NodeRecord::at(address, address));
        peers.handle_list(list().into());
        assert_eq!(unreached(&peers), ["a:1", "b:1"]);
        answer(&peers, "b:1", 1);
        assert_eq!(unreached(&peers), ["a:1"]);
        answer(&peers, "b:1", 2);
        peers.handle_list(list().into());
        assert_eq!(unreached(&peers), ["a:1"]);
        peers.handle_list(vec![NodeRecord::at("b:1", "b:1")]);
        assert_eq!(unreached(&peers), [""; 0]);
    }
}
