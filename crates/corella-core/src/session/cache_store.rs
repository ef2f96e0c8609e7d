//! Which rows a prefill node has on offer, who has asked for them, and what can be sent.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::session::deadline_queue::DeadlineQueue;
use crate::session::tombstone::Tombstones;
use crate::session::{SessionConfig, SessionConfigError, SessionKey};
use crate::{Incarnation, PageHash};

/// The bookkeeping of a cache store: of offers and loads, not of bytes.
///
/// An offer is registered, filled layer by layer, completed, and withdrawn. A load may come before
/// its offer, as a subscription with a deadline. When that deadline passes, or an offer is
/// withdrawn, a tombstone remains, so that a load or an offer that comes too late is dropped
/// instead of waiting for ever. Rows are sent only once they have been filled, and no row is sent
/// twice.
///
/// Pages that several offers share are counted by their hash: the last offer that names a page lets
/// go of it.
#[derive(Debug)]
pub struct CacheStore {
    /// This start of the node: rows of an earlier one are gone.
    incarnation: Incarnation,
    max_entries: usize,
    entries: BTreeMap<SessionKey, Entry>,
    num_users: BTreeMap<PageHash, u32>,
    ended: Tombstones<SessionKey>,
    /// The deadlines of subscriptions.
    timers: DeadlineQueue<SessionKey>,
    actions: VecDeque<CacheStoreAction>,
    now_us: u64,
}

/// What the driver is to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheStoreAction {
    /// Sends rows of one layer to the node that loads them.
    Send {
        key: SessionKey,
        layer: u32,
        rows: Range<u32>,
    },
    /// No offer came in time: tells the node that asked, and closes the connection.
    TimeOutLoad { key: SessionKey },
    /// Stops reading rows and closes the connection that they go to.
    /// [`CacheStore::handle_stopped`] says that nothing is read any more.
    Stop { key: SessionKey },
    /// Nothing reads rows for this offer any more.
    Deleted { key: SessionKey },
    /// No offer names this page any more.
    Release { page: PageHash },
}

/// Why an offer was dropped. Nothing was kept of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreDropped {
    /// Its load has timed out, or its session has ended.
    Ended,
    Duplicate,
    TooMany {
        limit: usize,
    },
}

/// Why a load is refused. Nothing was kept of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadRefusal {
    /// The offer was withdrawn, or the load has already been closed or has timed out.
    Ended,
    /// It asks for rows of an earlier start of this node.
    StaleIncarnation,
    Duplicate,
    TooMany {
        limit: usize,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStoreStats {
    /// Offers, subscriptions, and loads that are being stopped.
    pub num_entries: usize,
    /// Loads without an offer.
    pub num_subscriptions: usize,
    /// Different pages that offers name.
    pub num_pages: usize,
    pub num_tombstones: usize,
    pub num_timers: usize,
}

#[derive(Debug, Default)]
struct Entry {
    offer: Option<Offer>,
    load: Load,
    /// The offer was taken back, and the load is being stopped.
    is_stopping: bool,
}

#[derive(Debug)]
struct Offer {
    num_rows: u32,
    /// Rows that are filled, by layer.
    num_filled: Vec<u32>,
    pages: Vec<PageHash>,
}

#[derive(Debug, Default)]
enum Load {
    #[default]
    Awaited,
    /// By layer, the next row to send.
    Open {
        first_row: u32,
        next: Vec<u32>,
    },
    Closed,
}

impl CacheStore {
    pub fn new(
        config: &SessionConfig,
        incarnation: Incarnation,
    ) -> Result<Self, SessionConfigError> {
        config.validate()?;
        Ok(Self {
            incarnation,
            // Sessions of this node, and loads of others that are early.
            max_entries: 2 * config.max_sessions as usize,
            entries: BTreeMap::new(),
            num_users: BTreeMap::new(),
            ended: Tombstones::new(config.tombstone_us, config.max_tombstones as usize),
            timers: DeadlineQueue::new(),
            actions: VecDeque::new(),
            now_us: 0,
        })
    }

    /// Offers `num_rows` rows in `num_layers` layers, none of which is filled yet. `pages` names those
    /// whole pages of them that others may have, too.
    pub fn store(
        &mut self,
        key: SessionKey,
        num_layers: u32,
        num_rows: u32,
        pages: Vec<PageHash>,
        now_us: u64,
    ) -> Result<(), StoreDropped> {
        self.note_time(now_us);
        if self.ended.contains(key) {
            return Err(StoreDropped::Ended);
        }
        let limit = self.max_entries;
        if !self.entries.contains_key(&key) && self.entries.len() >= limit {
            return Err(StoreDropped::TooMany { limit });
        }
        let entry = self.entries.entry(key).or_default();
        if entry.offer.is_some() {
            return Err(StoreDropped::Duplicate);
        }
        for &page in &pages {
            *self.num_users.entry(page).or_default() += 1;
        }
        if let Load::Open { first_row, next } = &mut entry.load {
            next.resize(num_layers as usize, *first_row);
        }
        entry.offer = Some(Offer {
            num_rows,
            num_filled: alloc::vec![0; num_layers as usize],
            pages,
        });
        self.timers.set(key, None);
        Ok(())
    }

    /// A node asks for the rows from `first_row` on, and waits for the offer until `deadline_us`.
    pub fn load(
        &mut self,
        key: SessionKey,
        first_row: u32,
        deadline_us: u64,
        now_us: u64,
    ) -> Result<(), LoadRefusal> {
        self.note_time(now_us);
        if key.prefill_incarnation != self.incarnation {
            return Err(LoadRefusal::StaleIncarnation);
        }
        if self.ended.contains(key) {
            return Err(LoadRefusal::Ended);
        }
        let limit = self.max_entries;
        if !self.entries.contains_key(&key) && self.entries.len() >= limit {
            return Err(LoadRefusal::TooMany { limit });
        }
        let entry = self.entries.entry(key).or_default();
        if !matches!(entry.load, Load::Awaited) {
            return Err(LoadRefusal::Duplicate);
        }
        let num_layers = entry.offer.as_ref().map_or(0, |o| o.num_filled.len());
        entry.load = Load::Open {
            first_row,
            next: alloc::vec![first_row; num_layers],
        };
        match entry.offer {
            Some(_) => {
                for layer in 0..num_layers {
                    self.send_filled(key, layer);
                }
            }
            None => self.timers.set(key, Some(deadline_us)),
        }
        Ok(())
    }

    /// The first `num_rows` rows of a layer are there, and stay as they are.
    pub fn handle_filled(&mut self, key: SessionKey, layer: u32, num_rows: u32) {
        let layer = layer as usize;
        let entry = self.entries.get_mut(&key);
        let Some(offer) = entry.and_then(|entry| entry.offer.as_mut()) else {
            return;
        };
        let num_rows = num_rows.min(offer.num_rows);
        if let Some(num_filled) = offer.num_filled.get_mut(layer)
            && *num_filled < num_rows
        {
            *num_filled = num_rows;
            self.send_filled(key, layer);
        }
    }

    /// Withdraws an offer, or ends the load that has come before its offer.
    pub fn delete(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.ended.insert(key, self.now_us);
        self.timers.set(key, None);
        let entry = self.entries.get_mut(&key);
        match entry {
            Some(entry) if entry.is_stopping => {}
            Some(entry) if matches!(entry.load, Load::Open { .. }) => {
                entry.is_stopping = true;
                self.actions.push_back(CacheStoreAction::Stop { key });
            }
            _ => self.remove(key),
        }
    }

    /// The connection of a load is gone, and nothing is read for it any more. Returns true if the
    /// load was cut short: the offer still stands, and not all of its rows had been sent.
    pub fn handle_load_closed(&mut self, key: SessionKey, now_us: u64) -> bool {
        self.note_time(now_us);
        let Some(entry) = self.entries.get_mut(&key) else {
            return false;
        };
        if entry.is_stopping {
            self.remove(key);
            return false;
        }
        let Some(offer) = &entry.offer else {
            // No offer was made, so there is nothing to report as deleted.
            self.ended.insert(key, self.now_us);
            self.timers.set(key, None);
            self.entries.remove(&key);
            return false;
        };
        let load = core::mem::replace(&mut entry.load, Load::Closed);
        match load {
            Load::Open { next, .. } => next.iter().any(|&row| row < offer.num_rows),
            Load::Awaited | Load::Closed => false,
        }
    }

    /// The answer to [`CacheStoreAction::Stop`].
    pub fn handle_stopped(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        if self
            .entries
            .get(&key)
            .is_some_and(|entry| entry.is_stopping)
        {
            self.remove(key);
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called next.
    pub fn poll_timeout(&self) -> Option<u64> {
        let deadlines = [self.timers.first_us(), self.ended.first_us()];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.note_time(now_us);
        self.ended.expire(self.now_us);
        while let Some(key) = self.timers.due(self.now_us) {
            self.timers.set(key, None);
            self.ended.insert(key, self.now_us);
            self.entries.remove(&key);
            self.actions
                .push_back(CacheStoreAction::TimeOutLoad { key });
        }
    }

    pub fn poll_action(&mut self) -> Option<CacheStoreAction> {
        self.actions.pop_front()
    }

    /// How many offers name a page.
    pub fn num_users(&self, page: PageHash) -> u32 {
        self.num_users.get(&page).copied().unwrap_or(0)
    }

    /// Whether all rows of an offer are filled.
    pub fn is_complete(&self, key: SessionKey) -> bool {
        let offer = self
            .entries
            .get(&key)
            .and_then(|entry| entry.offer.as_ref());
        offer.is_some_and(|offer| offer.num_filled.iter().all(|&rows| rows == offer.num_rows))
    }

    pub fn stats(&self) -> CacheStoreStats {
        let entries = self.entries.values();
        CacheStoreStats {
            num_entries: self.entries.len(),
            num_subscriptions: entries.filter(|entry| entry.offer.is_none()).count(),
            num_pages: self.num_users.len(),
            num_tombstones: self.ended.len(),
            num_timers: self.timers.len(),
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(
            self.entries.len() <= self.max_entries,
            "more offers and loads than there may be"
        );
        self.ended.check_invariants();
        let mut num_users = BTreeMap::new();
        let mut num_timed = 0;
        for (&key, entry) in &self.entries {
            assert!(
                entry.is_stopping || !self.ended.contains(key),
                "session {key} is remembered as ended and has an entry"
            );
            let is_timed = self.timers.get(key).is_some();
            num_timed += usize::from(is_timed);
            assert_eq!(
                is_timed,
                entry.offer.is_none() && !entry.is_stopping,
                "only a subscription has a deadline: session {key}"
            );
            let Some(offer) = &entry.offer else {
                continue;
            };
            for page in &offer.pages {
                *num_users.entry(*page).or_default() += 1_u32;
            }
            if let Load::Open { first_row, next } = &entry.load {
                assert!(
                    next.len() == offer.num_filled.len()
                        && next
                            .iter()
                            .zip(&offer.num_filled)
                            .all(|(&row, &filled)| row <= filled.max(*first_row)),
                    "rows of session {key} are sent before they are filled"
                );
            }
        }
        assert_eq!(
            num_timed,
            self.timers.len(),
            "a deadline without a subscription"
        );
        assert_eq!(num_users, self.num_users, "the users of pages");
    }

    fn send_filled(&mut self, key: SessionKey, layer: usize) {
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        if let (Some(offer), Load::Open { next, .. }) = (&entry.offer, &mut entry.load)
            && !entry.is_stopping
            && next[layer] < offer.num_filled[layer]
        {
            let end_row = offer.num_filled[layer];
            let first_row = core::mem::replace(&mut next[layer], end_row);
            self.actions.push_back(CacheStoreAction::Send {
                key,
                layer: layer as u32,
                rows: first_row..end_row,
            });
        }
    }

    /// Forgets an entry that nothing is read for.
    fn remove(&mut self, key: SessionKey) {
        let offer = self.entries.remove(&key).and_then(|entry| entry.offer);
        self.actions.push_back(CacheStoreAction::Deleted { key });
        for page in offer.into_iter().flat_map(|offer| offer.pages) {
            if let Some(num_users) = self.num_users.get_mut(&page) {
                *num_users -= 1;
                if *num_users == 0 {
                    self.num_users.remove(&page);
                    self.actions.push_back(CacheStoreAction::Release { page });
                }
            }
        }
    }

    fn note_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }
}

impl fmt::Display for StoreDropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("nobody waits for these rows any more"),
            Self::Duplicate => f.write_str("these rows are on offer already"),
            Self::TooMany { limit } => write!(f, "{limit} offers and loads are open already"),
        }
    }
}

impl core::error::Error for StoreDropped {}

impl fmt::Display for LoadRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("these rows are not on offer any more"),
            Self::StaleIncarnation => f.write_str("the prefill node has been started again"),
            Self::Duplicate => f.write_str("these rows are being loaded already"),
            Self::TooMany { limit } => write!(f, "{limit} offers and loads are open already"),
        }
    }
}

impl core::error::Error for LoadRefusal {}
