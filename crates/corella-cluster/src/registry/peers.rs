//! The peer table with a clock and a lock, and the addresses that belong to its peers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use corella_core::{PeerChange, PeerId, PeerTable, PeerTableConfig};
use tokio::sync::watch;

use super::NodeRecord;

/// What all parts of a node know of the others. Locked for moments, once or twice for each
/// request, never for a token.
#[derive(Debug)]
pub struct Peers {
    start: Instant,
    state: Mutex<State>,
    /// Counts changes, for those who keep connections to the peers.
    version: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    table: PeerTable,
    /// The registry's last list, by instance id.
    listed: BTreeMap<String, NodeRecord>,
    /// The records of exactly those peers that are in the table.
    records: BTreeMap<PeerId, NodeRecord>,
}

impl Peers {
    pub(super) fn new(config: PeerTableConfig) -> Self {
        Self {
            start: Instant::now(),
            state: Mutex::new(State {
                table: PeerTable::new(config),
                listed: BTreeMap::new(),
                records: BTreeMap::new(),
            }),
            version: watch::Sender::new(0),
        }
    }

    /// Gives access to the table, together with the present time on its clock.
    pub fn with_table<T>(&self, act: impl FnOnce(&mut PeerTable, u64) -> T) -> T {
        let mut state = self.lock();
        let outcome = act(&mut state.table, self.now_us());
        self.follow_changes(&mut state);
        outcome
    }

    pub fn record(&self, peer_id: PeerId) -> Option<NodeRecord> {
        self.lock().records.get(&peer_id).cloned()
    }

    /// All peers, whatever their health.
    pub fn records(&self) -> Vec<(PeerId, NodeRecord)> {
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
        state.table.handle_list(&peer_records, now_us);
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
        self.with_table(|table, now_us| table.handle_outage(now_us));
    }

    fn follow_changes(&self, state: &mut State) {
        let mut has_changed = false;
        while let Some(change) = state.table.poll_change() {
            has_changed = true;
            match change {
                PeerChange::Added {
                    instance_id,
                    peer_id,
                } => {
                    tracing::info!("node {instance_id} has joined");
                    if let Some(record) = state.listed.get(&instance_id) {
                        state.records.insert(peer_id, record.clone());
                    }
                }
                PeerChange::Restarted {
                    instance_id,
                    old,
                    new,
                } => {
                    tracing::info!("node {instance_id} was restarted");
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
                    tracing::info!("node {instance_id} is gone");
                    state.records.remove(&peer_id);
                }
            }
        }
        if has_changed {
            self.version.send_modify(|version| *version += 1);
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in one request must not end all others; the table is never left half changed
        // across a call of code that could panic.
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
