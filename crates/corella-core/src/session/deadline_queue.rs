//! One deadline for each key, the earliest first.

use alloc::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub(super) struct DeadlineQueue<K> {
    by_time: BTreeSet<(u64, K)>,
    by_key: BTreeMap<K, u64>,
}

impl<K: Copy + Ord> DeadlineQueue<K> {
    pub fn new() -> Self {
        Self {
            by_time: BTreeSet::new(),
            by_key: BTreeMap::new(),
        }
    }

    pub fn set(&mut self, key: K, deadline_us: Option<u64>) {
        let before = match deadline_us {
            Some(deadline_us) => self.by_key.insert(key, deadline_us),
            None => self.by_key.remove(&key),
        };
        if let Some(before_us) = before {
            self.by_time.remove(&(before_us, key));
        }
        if let Some(deadline_us) = deadline_us {
            self.by_time.insert((deadline_us, key));
        }
    }

    pub fn get(&self, key: K) -> Option<u64> {
        self.by_key.get(&key).copied()
    }

    pub fn first_us(&self) -> Option<u64> {
        self.by_time.first().map(|&(deadline_us, _)| deadline_us)
    }

    /// Returns the key with the earliest deadline, if that deadline has passed.
    pub fn due(&self, now_us: u64) -> Option<K> {
        let &(deadline_us, key) = self.by_time.first()?;
        (deadline_us <= now_us).then_some(key)
    }

    pub fn len(&self) -> usize {
        assert_eq!(
            self.by_time.len(),
            self.by_key.len(),
            "a key has two deadlines"
        );
        self.by_key.len()
    }
}
