//! A node's exports, the loads that wait for one, and the sessions that have ended.

use alloc::collections::BTreeMap;
use core::fmt;

use crate::Incarnation;
use crate::session::SessionKey;
use crate::session::deadline_queue::DeadlineQueue;
use crate::session::tombstone::Tombstones;

/// The exports of a node. The table's owner moves the bytes, and keeps an `O` with each export and an `L` with each
/// load that waits for an export.
///
/// Exports and loads come in any order. A session has at most one export and one waiting load. The end of an export, or
/// of a load at its deadline, leaves a tombstone for a while, so that a late export or load is refused and does not
/// wait for ever.
///
/// Exports may share pages: the scheduler locks the pages of each request.
#[derive(Debug)]
pub struct ExportTable<O, L> {
    config: ExportTableConfig,
    exports: BTreeMap<SessionKey, O>,
    waiting: BTreeMap<SessionKey, L>,
    deadlines: DeadlineQueue<SessionKey>,
    over: Tombstones<SessionKey, ExportEnd>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportTableConfig {
    /// This start of the node. Rows of an earlier start are gone.
    pub incarnation: Incarnation,
    pub max_exports: usize,
    pub max_waiting_loads: usize,
    /// The time for which tombstones stay. Beyond `max_tombstones` tombstones, the oldest are removed early.
    pub tombstone_us: u64,
    pub max_tombstones: usize,
}

/// The reason why a session has no export any more, or never had one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportEnd {
    /// A load waited for the rows until its deadline.
    NotExported,
    Deleted,
    /// The rows could not be computed.
    Failed,
}

/// The reason why an export or a load was refused. Refusals leave no trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportRefusal {
    Over(ExportEnd),
    /// The load asks for rows of another start of this node.
    OtherIncarnation,
    /// The session has an export already.
    Duplicate,
    /// The table has no room for another export or waiting load.
    Full,
}

/// The answer to a load.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded<'a, O, L> {
    Exported(&'a O),
    /// The load waits for its export. It has `replaced` an earlier load of the session.
    Waits {
        replaced: Option<L>,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportTableStats {
    pub num_exports: usize,
    pub num_waiting_loads: usize,
    pub num_tombstones: usize,
}

impl<O, L> ExportTable<O, L> {
    pub fn new(config: ExportTableConfig) -> Self {
        Self {
            exports: BTreeMap::new(),
            waiting: BTreeMap::new(),
            deadlines: DeadlineQueue::new(),
            over: Tombstones::new(config.tombstone_us, config.max_tombstones),
            config,
        }
    }

    pub fn get(&self, key: SessionKey) -> Option<&O> {
        self.exports.get(&key)
    }

    /// Exports a session's rows, and returns the load that has waited for them.
    pub fn export(
        &mut self,
        key: SessionKey,
        export: O,
        now_us: u64,
    ) -> Result<Option<L>, ExportRefusal> {
        self.check_over(key, now_us)?;
        if self.exports.contains_key(&key) {
            return Err(ExportRefusal::Duplicate);
        }
        if self.exports.len() >= self.config.max_exports {
            return Err(ExportRefusal::Full);
        }
        self.exports.insert(key, export);
        Ok(self.stop_waiting(key))
    }

    /// Answers a node's load of a session's rows. The load waits for their export until `deadline_us`.
    pub fn load(
        &mut self,
        key: SessionKey,
        deadline_us: u64,
        now_us: u64,
        load: impl FnOnce() -> L,
    ) -> Result<Loaded<'_, O, L>, ExportRefusal> {
        if key.prefill_incarnation != self.config.incarnation {
            return Err(ExportRefusal::OtherIncarnation);
        }
        self.check_over(key, now_us)?;
        if let Some(export) = self.exports.get(&key) {
            return Ok(Loaded::Exported(export));
        }
        let is_full = self.waiting.len() >= self.config.max_waiting_loads;
        if is_full && !self.waiting.contains_key(&key) {
            return Err(ExportRefusal::Full);
        }
        self.deadlines.set(key, Some(deadline_us));
        let replaced = self.waiting.insert(key, load());
        Ok(Loaded::Waits { replaced })
    }

    /// Ends a session's export, or refuses a later export. Returns the export, and the load that waited for one.
    pub fn end(&mut self, key: SessionKey, how: ExportEnd, now_us: u64) -> (Option<O>, Option<L>) {
        self.over.expire(now_us);
        self.over.insert(key, how, now_us);
        (self.exports.remove(&key), self.stop_waiting(key))
    }

    /// Removes the waiting load of a session if `is_it` is true for the load. The load's node may load again.
    pub fn cancel(&mut self, key: SessionKey, is_it: impl FnOnce(&L) -> bool) -> Option<L> {
        self.waiting.get(&key).filter(|load| is_it(load))?;
        self.stop_waiting(key)
    }

    /// Removes and returns a load that has waited until its deadline.
    pub fn poll_late_load(&mut self, now_us: u64) -> Option<(SessionKey, L)> {
        let key = self.deadlines.due(now_us)?;
        let load = self.stop_waiting(key)?;
        self.over.expire(now_us);
        self.over.insert(key, ExportEnd::NotExported, now_us);
        Some((key, load))
    }

    /// The time of the next call of [`poll_late_load`](Self::poll_late_load).
    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first_us()
    }

    /// Removes all waiting loads and all exports. Returns the exports.
    pub fn clear(&mut self) -> impl Iterator<Item = O> + use<O, L> {
        self.waiting.clear();
        self.deadlines = DeadlineQueue::new();
        core::mem::take(&mut self.exports).into_values()
    }

    pub fn stats(&mut self, now_us: u64) -> ExportTableStats {
        self.over.expire(now_us);
        ExportTableStats {
            num_exports: self.exports.len(),
            num_waiting_loads: self.waiting.len(),
            num_tombstones: self.over.len(),
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(
            self.exports.len() <= self.config.max_exports
                && self.waiting.len() <= self.config.max_waiting_loads,
            "more exports or waiting loads than fit"
        );
        self.over.check_invariants();
        assert_eq!(
            self.deadlines.len(),
            self.waiting.len(),
            "waiting loads and their deadlines"
        );
        for &key in self.waiting.keys() {
            assert!(
                self.deadlines.get(key).is_some(),
                "the load of session {key} waits for ever"
            );
            assert!(
                !self.exports.contains_key(&key),
                "the load of session {key} waits for an export that is there"
            );
        }
        let mut keys = self.exports.keys().chain(self.waiting.keys());
        assert!(
            keys.all(|&key| self.over.get(key).is_none()),
            "a session is over, and has an export or a waiting load"
        );
    }

    fn check_over(&mut self, key: SessionKey, now_us: u64) -> Result<(), ExportRefusal> {
        self.over.expire(now_us);
        match self.over.get(key) {
            Some(how) => Err(ExportRefusal::Over(how)),
            None => Ok(()),
        }
    }

    fn stop_waiting(&mut self, key: SessionKey) -> Option<L> {
        self.deadlines.set(key, None);
        self.waiting.remove(&key)
    }
}

impl fmt::Display for ExportEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotExported => "nothing was exported in time",
            Self::Deleted => "the session is over",
            Self::Failed => "the rows could not be computed",
        })
    }
}
