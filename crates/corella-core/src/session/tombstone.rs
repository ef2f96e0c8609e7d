//! The ended sessions or loads whose late messages may still arrive.

use alloc::collections::{BTreeMap, VecDeque};

/// All tombstones stay for the same time, so the oldest goes first. `V` is the reason of the end.
#[derive(Clone, Debug)]
pub(super) struct Tombstones<K, V = ()> {
    stay_us: u64,
    max_len: usize,
    ends: BTreeMap<K, V>,
    /// The time until which each key is remembered, in order.
    in_order: VecDeque<(u64, K)>,
}

impl<K: Copy + Ord, V: Copy> Tombstones<K, V> {
    pub fn new(stay_us: u64, max_len: usize) -> Self {
        Self {
            stay_us,
            max_len,
            ends: BTreeMap::new(),
            in_order: VecDeque::new(),
        }
    }

    /// Adds a tombstone. A key with a tombstone keeps its first one. Time must not run backwards.
    pub fn insert(&mut self, key: K, end: V, now_us: u64) {
        if self.ends.contains_key(&key) {
            return;
        }
        self.ends.insert(key, end);
        let until_us = now_us.saturating_add(self.stay_us);
        self.in_order.push_back((until_us, key));
        while self.in_order.len() > self.max_len {
            self.remove_oldest();
        }
    }

    pub fn get(&self, key: K) -> Option<V> {
        self.ends.get(&key).copied()
    }

    pub fn contains(&self, key: K) -> bool {
        self.ends.contains_key(&key)
    }

    pub fn first_us(&self) -> Option<u64> {
        self.in_order.front().map(|&(until_us, _)| until_us)
    }

    pub fn expire(&mut self, now_us: u64) {
        while self.first_us().is_some_and(|until_us| until_us <= now_us) {
            self.remove_oldest();
        }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn check_invariants(&self) {
        assert_eq!(
            self.ends.len(),
            self.in_order.len(),
            "an end is remembered and will not be forgotten"
        );
        assert!(
            self.ends.len() <= self.max_len,
            "more ends are remembered than may be"
        );
        assert!(
            self.in_order
                .iter()
                .is_sorted_by_key(|&(until_us, _)| until_us),
            "ends are forgotten out of their order"
        );
    }

    fn remove_oldest(&mut self) {
        if let Some((_, key)) = self.in_order.pop_front() {
            self.ends.remove(&key);
        }
    }
}
