//! What has ended, for as long as something of it may still arrive.

use alloc::collections::{BTreeMap, VecDeque};

/// All tombstones stay equally long, so that the oldest is always the next to go.
#[derive(Debug)]
pub(super) struct Tombstones<K> {
    stay_us: u64,
    max_len: usize,
    ends_us: BTreeMap<K, u64>,
    in_order: VecDeque<(u64, K)>,
}

impl<K: Copy + Ord> Tombstones<K> {
    pub fn new(stay_us: u64, max_len: usize) -> Self {
        Self {
            stay_us,
            max_len,
            ends_us: BTreeMap::new(),
            in_order: VecDeque::new(),
        }
    }

    /// Inserting a key again does not extend its stay. Time must not run backwards.
    pub fn insert(&mut self, key: K, now_us: u64) {
        if self.ends_us.contains_key(&key) {
            return;
        }
        if self.ends_us.len() == self.max_len
            && let Some((_, oldest)) = self.in_order.pop_front()
        {
            self.ends_us.remove(&oldest);
        }
        let end_us = now_us.saturating_add(self.stay_us);
        self.ends_us.insert(key, end_us);
        self.in_order.push_back((end_us, key));
    }

    pub fn contains(&self, key: K) -> bool {
        self.ends_us.contains_key(&key)
    }

    pub fn first_us(&self) -> Option<u64> {
        self.in_order.front().map(|&(end_us, _)| end_us)
    }

    pub fn expire(&mut self, now_us: u64) {
        while let Some(&(end_us, key)) = self.in_order.front()
            && end_us <= now_us
        {
            self.in_order.pop_front();
            self.ends_us.remove(&key);
        }
    }

    pub fn len(&self) -> usize {
        self.ends_us.len()
    }

    pub fn check_invariants(&self) {
        assert_eq!(
            self.ends_us.len(),
            self.in_order.len(),
            "an end is remembered and will not be forgotten"
        );
        assert!(
            self.ends_us.len() <= self.max_len,
            "more ends are remembered than may be"
        );
        assert!(
            self.in_order.iter().is_sorted_by_key(|&(end_us, _)| end_us),
            "ends are forgotten out of their order"
        );
    }
}
