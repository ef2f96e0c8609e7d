//! The directory of peers with a clock and a lock, and the addresses of its peers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use corella_core::{Directory, DirectoryConfig, NodeId, PeerChange, PeerStanding};
use tokio::sync::watch;
use tonic::transport::Channel;

use super::NodeRecord;

/// The directory that all parts of a node share. Locked for moments, once or twice for each
/// request, never for a token.
#[derive(Debug)]
pub struct Peers {
    start: Instant,
    state: Mutex<State>,
    /// Counts changes, for owners of connections to the peers.
    version: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    directory: Directory,
    /// The registry's last list, by instance id.
    listed: BTreeMap<String, NodeRecord>,
    /// The records of exactly the peers in the directory.
    records: BTreeMap<NodeId, NodeRecord>,
    /// Connections to peers in the directory.
    channels: BTreeMap<NodeId, Channel>,
    /// Listed peers that have not answered yet. A list of addresses also names nodes that do not run.
    unreached: BTreeMap<NodeId, String>,
}

impl Peers {
    pub(super) fn new(config: DirectoryConfig) -> Self {
        Self {
            start: Instant::now(),
            state: Mutex::new(State {
                directory: Directory::new(config),
                listed: BTreeMap::new(),
                records: BTreeMap::new(),
                channels: BTreeMap::new(),
                unreached: BTreeMap::new(),
            }),
            version: watch::Sender::new(0),
        }
    }

    /// Gives access to the directory, together with the present time on its clock.
    pub fn with<T>(&self, act: impl FnOnce(&mut Directory, u64) -> T) -> T {
        let mut state = self.lock();
        let outcome = act(&mut state.directory, self.now_us());
        self.follow_changes(&mut state);
        outcome
    }

    pub fn record(&self, peer_id: NodeId) -> Option<NodeRecord> {
        self.lock().records.get(&peer_id).cloned()
    }

    /// Returns the connection to a peer. The first call makes it by `connect`, and it is kept.
    pub fn channel(
        &self,
        peer_id: NodeId,
        connect: impl FnOnce(&NodeRecord) -> Option<Channel>,
    ) -> Option<Channel> {
        let mut state = self.lock();
        if let Some(channel) = state.channels.get(&peer_id) {
            return Some(channel.clone());
        }
        let channel = connect(state.records.get(&peer_id)?)?;
        state.channels.insert(peer_id, channel.clone());
        Some(channel)
    }

    /// Returns all peers, regardless of their health.
    pub fn records(&self) -> Vec<(NodeId, NodeRecord)> {
        let state = self.lock();
        { state.records.iter() }
            .map(|(&peer_id, record)| (peer_id, record.clone()))
            .collect()
    }

    /// Changes whenever a peer comes, goes or is restarted, or its record changes.
    pub fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn handle_list(&self, list: Vec<NodeRecord>) {
        let peer_records: Vec<_> = list.iter().map(NodeRecord::peer_record).collect();
        let mut state = self.lock();
        let listed: BTreeMap<_, _> = { list.into_iter() }
            .map(|record| (record.instance_id.clone(), record))
            .collect();
        let now_us = self.now_us();
        state.listed = listed;
        state.directory.peers.handle_list(&peer_records, now_us);
        self.follow_changes(&mut state);
        let State {
            listed, records, ..
        } = &mut *state;
        let mut has_changed = false;
        for record in records.values_mut() {
            if let Some(newest) = listed.get(&record.instance_id)
                && newest != record
            {
                record.clone_from(newest);
                has_changed = true;
            }
        }
        if has_changed {
            self.version.send_modify(|version| *version += 1);
        }
    }

    pub(super) fn handle_outage(&self) {
        self.with(|directory, now_us| directory.peers.handle_outage(now_us));
    }

    fn follow_changes(&self, state: &mut State) {
        let mut has_changed = false;
        while let Some(change) = state.directory.peers.poll_change() {
            has_changed = true;
            match change {
                PeerChange::Added {
                    instance_id,
                    peer_id,
                } => {
                    tracing::info!("node {instance_id} is listed, and joins when it answers");
                    if let Some(record) = state.listed.get(&instance_id) {
                        state.records.insert(peer_id, record.clone());
                    }
                    state.unreached.insert(peer_id, instance_id);
                }
                PeerChange::Restarted {
                    instance_id,
                    old,
                    new,
                } => {
                    match state.unreached.remove(&old) {
                        None => tracing::info!("node {instance_id} was restarted"),
                        Some(_) => {
                            state.unreached.insert(new, instance_id.clone());
                        }
                    }
                    let record = state.records.remove(&old);
                    let record = state.listed.get(&instance_id).cloned().or(record);
                    if let Some(record) = record {
                        state.records.insert(new, record);
                    }
                }
                PeerChange::Removed {
                    instance_id,
                    peer_id,
                } => {
                    match state.unreached.remove(&peer_id) {
                        None => tracing::info!("node {instance_id} is gone"),
                        Some(_) => tracing::info!("node {instance_id} is no longer listed"),
                    }
                    state.records.remove(&peer_id);
                }
            }
        }
        let State {
            directory,
            records,
            channels,
            unreached,
            ..
        } = state;
        unreached.retain(
            |&peer_id, instance_id| match directory.peers.standing(peer_id) {
                Some(PeerStanding::Healthy | PeerStanding::Draining) => {
                    tracing::info!("node {instance_id} has joined");
                    false
                }
                // An incompatible peer has its own warning.
                Some(PeerStanding::Suspect | PeerStanding::Incompatible) => true,
                None => false,
            },
        );
        if has_changed {
            channels.retain(|peer_id, _| records.contains_key(peer_id));
            self.version.send_modify(|version| *version += 1);
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in one request must not end all others. The directory is never left half
        // changed across a call that could panic.
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use corella_core::PeerFacts;

    use super::*;

    fn unreached(peers: &Peers) -> Vec<String> {
        peers.lock().unreached.values().cloned().collect()
    }

    fn answer(peers: &Peers, name: &str, incarnation: u64) {
        let facts = PeerFacts {
            incarnation,
            page_size: 16,
        };
        peers.with(|directory, now_us| {
            let table = &mut directory.peers;
            let peer_id = table.peer_id(name).expect("it is listed");
            table.handle_hello(peer_id, facts, now_us);
        });
    }

    /// Fixed addresses also list nodes that do not run.
    #[test]
    fn a_node_joins_when_it_answers() {
        let peers = Peers::new(DirectoryConfig::default());
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
