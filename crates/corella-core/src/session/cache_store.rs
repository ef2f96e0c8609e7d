//! Which sessions' rows a prefill node has on offer, whose loads wait for an offer, and what is over.

use alloc::collections::BTreeMap;
use core::fmt;

use crate::Incarnation;
use crate::session::SessionKey;
use crate::session::deadline_queue::DeadlineQueue;
use crate::session::tombstone::Tombstones;

/// The books of a cache store: its owner keeps `O` of each offer, moves the bytes, and keeps `L` of
/// each load that has come before its offer.
///
/// Offers and loads come in any order, and each session has at most one offer and one waiting load.
/// When an offer ends, or a load has waited until its deadline, a tombstone remains for a while, so
/// that an offer or a load that comes too late is refused instead of waiting for ever.
///
/// Offers that have pages in common are none of its business: the scheduler locks the pages of each
/// request on their own.
#[derive(Debug)]
pub struct CacheStore<O, L> {
    config: CacheStoreConfig,
    offers: BTreeMap<SessionKey, O>,
    waiting: BTreeMap<SessionKey, L>,
    deadlines: DeadlineQueue<SessionKey>,
    over: Tombstones<SessionKey, OfferEnd>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheStoreConfig {
    /// This start of the node: rows of an earlier one are gone.
    pub incarnation: Incarnation,
    pub max_offers: usize,
    pub max_waiting_loads: usize,
    /// How long tombstones stay. When there are too many, the oldest go early.
    pub tombstone_us: u64,
    pub max_tombstones: usize,
}

/// How a session's rows ceased to be there for others, or turned out never to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfferEnd {
    /// A load waited for them, and its deadline has passed.
    NotStored,
    Deleted,
    /// They could not be computed.
    Failed,
}

/// Why an offer or a load is not taken. Nothing was kept of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreRefusal {
    Over(OfferEnd),
    /// The load asks for rows of another start of this node.
    OtherIncarnation,
    /// The session has an offer already.
    Duplicate,
    /// There are as many offers or waiting loads as there may be.
    Full,
}

/// What becomes of a load.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded<'a, O, L> {
    Offered(&'a O),
    /// It waits for its offer. `replaced` is an earlier load of the session, which waits no longer.
    Waits {
        replaced: Option<L>,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStoreStats {
    pub num_offers: usize,
    pub num_waiting_loads: usize,
    pub num_tombstones: usize,
}

impl<O, L> CacheStore<O, L> {
    pub fn new(config: CacheStoreConfig) -> Self {
        Self {
            offers: BTreeMap::new(),
            waiting: BTreeMap::new(),
            deadlines: DeadlineQueue::new(),
            over: Tombstones::new(config.tombstone_us, config.max_tombstones),
            config,
        }
    }

    pub fn get(&self, key: SessionKey) -> Option<&O> {
        self.offers.get(&key)
    }

    /// Offers a session's rows, and returns the load that has waited for them.
    pub fn store(
        &mut self,
        key: SessionKey,
        offer: O,
        now_us: u64,
    ) -> Result<Option<L>, StoreRefusal> {
        self.check_over(key, now_us)?;
        if self.offers.contains_key(&key) {
            return Err(StoreRefusal::Duplicate);
        }
        if self.offers.len() >= self.config.max_offers {
            return Err(StoreRefusal::Full);
        }
        self.offers.insert(key, offer);
        Ok(self.stop_waiting(key))
    }

    /// A node asks for a session's rows, and waits for their offer until `deadline_us`.
    pub fn load(
        &mut self,
        key: SessionKey,
        deadline_us: u64,
        now_us: u64,
        load: impl FnOnce() -> L,
    ) -> Result<Loaded<'_, O, L>, StoreRefusal> {
        if key.prefill_incarnation != self.config.incarnation {
            return Err(StoreRefusal::OtherIncarnation);
        }
        self.check_over(key, now_us)?;
        if let Some(offer) = self.offers.get(&key) {
            return Ok(Loaded::Offered(offer));
        }
        let is_full = self.waiting.len() >= self.config.max_waiting_loads;
        if is_full && !self.waiting.contains_key(&key) {
            return Err(StoreRefusal::Full);
        }
        self.deadlines.set(key, Some(deadline_us));
        let replaced = self.waiting.insert(key, load());
        Ok(Loaded::Waits { replaced })
    }

    /// Withdraws a session's offer, or sees to it that there will be none. Returns the offer, and the
    /// load that waited for one.
    pub fn end(&mut self, key: SessionKey, how: OfferEnd, now_us: u64) -> (Option<O>, Option<L>) {
        self.over.expire(now_us);
        self.over.insert(key, how, now_us);
        (self.offers.remove(&key), self.stop_waiting(key))
    }

    /// Whoever asked wants the rows no more, and may ask again. Does nothing unless the waiting load
    /// `is_it`.
    pub fn cancel(&mut self, key: SessionKey, is_it: impl FnOnce(&L) -> bool) -> Option<L> {
        self.waiting.get(&key).filter(|load| is_it(load))?;
        self.stop_waiting(key)
    }

    /// A load that has waited until its deadline.
    pub fn poll_late_load(&mut self, now_us: u64) -> Option<(SessionKey, L)> {
        let key = self.deadlines.due(now_us)?;
        let load = self.stop_waiting(key)?;
        self.over.expire(now_us);
        self.over.insert(key, OfferEnd::NotStored, now_us);
        Some((key, load))
    }

    /// When [`poll_late_load`](Self::poll_late_load) is to be called next.
    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first_us()
    }

    /// Forgets all waiting loads and returns all offers.
    pub fn clear(&mut self) -> impl Iterator<Item = O> + use<O, L> {
        self.waiting.clear();
        self.deadlines = DeadlineQueue::new();
        core::mem::take(&mut self.offers).into_values()
    }

    pub fn stats(&mut self, now_us: u64) -> CacheStoreStats {
        self.over.expire(now_us);
        CacheStoreStats {
            num_offers: self.offers.len(),
            num_waiting_loads: self.waiting.len(),
            num_tombstones: self.over.len(),
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(
            self.offers.len() <= self.config.max_offers
                && self.waiting.len() <= self.config.max_waiting_loads,
            "more offers or waiting loads than there may be"
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
                !self.offers.contains_key(&key),
                "the load of session {key} waits for what is there"
            );
        }
        let mut keys = self.offers.keys().chain(self.waiting.keys());
        assert!(
            keys.all(|&key| self.over.get(key).is_none()),
            "a session is over, and has an offer or a waiting load"
        );
    }

    fn check_over(&mut self, key: SessionKey, now_us: u64) -> Result<(), StoreRefusal> {
        self.over.expire(now_us);
        match self.over.get(key) {
            Some(how) => Err(StoreRefusal::Over(how)),
            None => Ok(()),
        }
    }

    fn stop_waiting(&mut self, key: SessionKey) -> Option<L> {
        self.deadlines.set(key, None);
        self.waiting.remove(&key)
    }
}

impl fmt::Display for OfferEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStored => "nothing was stored in time",
            Self::Deleted => "the session is over",
            Self::Failed => "the rows could not be computed",
        })
    }
}
