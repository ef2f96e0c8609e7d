//! A cache of the most recent entries, within a bound. It serves requests with common parts: compiled grammars, and the
//! tokens of words and of long sections between special tokens.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::sync::{Mutex, PoisonError};

/// A cache in two generations. An entry that is found or added belongs to the younger generation. When the younger
/// generation has half of the room, it becomes the older one, and the entries of the previous older one are dropped. So
/// a use moves no entries in a list, and an entry in constant use always stays.
pub(crate) struct RecentCache<K, V> {
    generations: Mutex<[Generation<K, V>; 2]>,
    max_weight: usize,
}

struct Generation<K, V> {
    entries: HashMap<K, Entry<V>>,
    weight: usize,
}

struct Entry<V> {
    value: V,
    weight: usize,
}

impl<K: Eq + Hash, V: Clone> RecentCache<K, V> {
    pub(crate) fn new(max_weight: usize) -> Self {
        Self {
            generations: Mutex::new([Generation::default(), Generation::default()]),
            max_weight,
        }
    }

    pub(crate) fn find<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let mut generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let [young, old] = &mut *generations;
        if let Some(entry) = young.entries.get(key) {
            return Some(entry.value.clone());
        }
        let (key, entry) = old.entries.remove_entry(key)?;
        old.weight -= entry.weight;
        let value = entry.value.clone();
        self.insert(&mut generations, key, entry);
        Some(value)
    }

    /// Adds an entry after a miss, unless it has more than half of the room.
    pub(crate) fn keep(&self, key: K, value: V, weight: usize) {
        let mut generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Two callers may have missed the entry at the same time.
        if !generations
            .iter()
            .any(|generation| generation.entries.contains_key(&key))
        {
            self.insert(&mut generations, key, Entry { value, weight });
        }
    }

    fn insert(&self, [young, old]: &mut [Generation<K, V>; 2], key: K, entry: Entry<V>) {
        let max_weight = self.max_weight / 2;
        if entry.weight > max_weight {
            return;
        }
        if young.weight + entry.weight > max_weight {
            *old = mem::take(young);
        }
        young.weight += entry.weight;
        young.entries.insert(key, entry);
    }
}

impl<K, V> Default for Generation<K, V> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            weight: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_the_rest_goes() {
        let cache = RecentCache::new(20);
        for number in 0..1000 {
            assert_eq!(cache.find(&number), None);
            cache.keep(number, number, 1);
            assert_eq!(cache.find(&0), Some(0));
        }
        let kept: Vec<_> = (0..1000)
            .filter(|number| cache.find(number).is_some())
            .collect();
        assert!((11..=20).contains(&kept.len()), "{kept:?}");
        assert_eq!(kept[0], 0);
        assert!(kept[1..].iter().all(|&number| number >= 980), "{kept:?}");
    }

    #[test]
    fn weights_are_bounded() {
        let cache = RecentCache::new(20);
        cache.keep("heavy", 1, 11);
        assert_eq!(cache.find("heavy"), None);
        for name in ["a", "b", "c", "d", "e"] {
            cache.keep(name, 2, 9);
            assert_eq!(cache.find(name), Some(2));
            let generations = cache.generations.lock().expect("no holder panics");
            let weights = generations.each_ref().map(|generation| {
                let weight = generation
                    .entries
                    .values()
                    .map(|entry| entry.weight)
                    .sum::<usize>();
                assert_eq!(weight, generation.weight);
                weight
            });
            assert!(weights.iter().all(|&weight| weight <= 10), "{weights:?}");
        }
        // The last one and the one before it.
        assert_eq!(
            ["c", "d", "e"].map(|name| cache.find(name)),
            [None, Some(2), Some(2)]
        );
        // The same key again adds no weight.
        cache.keep("e", 3, 9);
        assert_eq!(cache.find("e"), Some(2));
    }
}
