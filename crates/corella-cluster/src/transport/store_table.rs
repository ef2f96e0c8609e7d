//! Which sessions a sender knows: stored, asked for in advance, or over.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use corella_core::session::SessionKey;

use super::SenderConfig;
use super::frame::{Frame, LoadFrame, Refusal};
use super::outgoing::Outgoing;
use super::sender_connection::SenderConnection;
use super::tombstones::Tombstones;

/// Bounded in each of its parts.
pub struct StoreTable {
    stored: HashMap<SessionKey, Arc<Outgoing>>,
    /// Loads that came before their store.
    waiting: HashMap<SessionKey, WaitingLoad>,
    /// When they have waited long enough.
    deadlines: BTreeSet<(Instant, SessionKey)>,
    tombstones: Tombstones,
    max_stored: usize,
    max_waiting: usize,
}

struct WaitingLoad {
    connection: Arc<SenderConnection>,
    load: LoadFrame,
    deadline: Instant,
}

impl WaitingLoad {
    fn is(&self, connection: &Arc<SenderConnection>, load_id: u64) -> bool {
        self.load.load_id == load_id && Arc::ptr_eq(&self.connection, connection)
    }

    fn refuse(&self, reason: Refusal) {
        self.connection.remove_load(self.load.load_id);
        self.connection.send(&Frame::Failed {
            load_id: self.load.load_id,
            reason,
        });
    }
}

/// What comes of a load.
pub enum Lookup {
    Stored(Arc<Outgoing>),
    Refused(Refusal),
    /// It waits; whoever watches the deadlines should look again.
    Waits,
}

impl StoreTable {
    pub fn new(config: &SenderConfig) -> Self {
        Self {
            stored: HashMap::new(),
            waiting: HashMap::new(),
            deadlines: BTreeSet::new(),
            tombstones: Tombstones::new(config.tombstone_time, config.max_tombstones),
            max_stored: config.max_stored,
            max_waiting: config.max_waiting_loads,
        }
    }

    pub fn get(&self, key: &SessionKey) -> Option<&Arc<Outgoing>> {
        self.stored.get(key)
    }

    /// The error says why a session cannot be stored. What waits for it is served.
    pub fn insert(&mut self, outgoing: Arc<Outgoing>, now: Instant) -> Result<(), Refusal> {
        let key = outgoing.key;
        if let Some(reason) = self.tombstones.get(&key, now) {
            return Err(reason);
        }
        if self.stored.contains_key(&key) || self.stored.len() >= self.max_stored {
            return Err(Refusal::Busy);
        }
        self.stored.insert(key, outgoing.clone());
        if let Some(waiting) = self.remove_waiting(&key) {
            waiting.connection.remove_load(waiting.load.load_id);
            outgoing.serve(&waiting.connection, &waiting.load);
        }
        Ok(())
    }

    pub fn remove(
        &mut self,
        key: &SessionKey,
        reason: Refusal,
        now: Instant,
    ) -> Option<Arc<Outgoing>> {
        self.tombstones.insert(*key, reason, now);
        if let Some(waiting) = self.remove_waiting(key) {
            waiting.refuse(reason);
        }
        self.stored.remove(key)
    }

    pub fn look_up(
        &mut self,
        connection: &Arc<SenderConnection>,
        load: LoadFrame,
        deadline: Instant,
        now: Instant,
    ) -> Lookup {
        let key = load.key;
        if let Some(outgoing) = self.stored.get(&key) {
            return Lookup::Stored(outgoing.clone());
        }
        if let Some(reason) = self.tombstones.get(&key, now) {
            return Lookup::Refused(reason);
        }
        if let Some(older) = self.remove_waiting(&key) {
            older.refuse(Refusal::Superseded);
        }
        if self.waiting.len() >= self.max_waiting || !connection.add_waiting(load.load_id, key) {
            return Lookup::Refused(Refusal::Busy);
        }
        self.deadlines.insert((deadline, key));
        let connection = connection.clone();
        self.waiting.insert(
            key,
            WaitingLoad {
                connection,
                load,
                deadline,
            },
        );
        Lookup::Waits
    }

    /// Refuses the loads whose time is up, and returns when the next one's will be.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        while let Some(&(deadline, key)) = self.deadlines.first() {
            if deadline > now {
                return Some(deadline);
            }
            if let Some(waiting) = self.remove_waiting(&key) {
                waiting.refuse(Refusal::NotStored);
            }
            self.tombstones.insert(key, Refusal::NotStored, now);
        }
        None
    }

    /// The receiver wants it no more; it may ask again.
    pub fn cancel(&mut self, connection: &Arc<SenderConnection>, load_id: u64, key: &SessionKey) {
        let waiting = self.waiting.get(key);
        if waiting.is_some_and(|waiting| waiting.is(connection, load_id)) {
            self.remove_waiting(key);
        }
    }

    pub fn clear(&mut self) -> Vec<Arc<Outgoing>> {
        self.waiting.clear();
        self.deadlines.clear();
        self.stored.drain().map(|(_, outgoing)| outgoing).collect()
    }

    pub fn num_stored(&self) -> usize {
        self.stored.len()
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn num_tombstones(&mut self, now: Instant) -> usize {
        self.tombstones.expire(now);
        self.tombstones.len()
    }

    fn remove_waiting(&mut self, key: &SessionKey) -> Option<WaitingLoad> {
        let waiting = self.waiting.remove(key)?;
        self.deadlines.remove(&(waiting.deadline, *key));
        Some(waiting)
    }
}
