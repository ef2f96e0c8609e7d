//! The slot of each page, and the choice of the next slot.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use crossbeam_channel::Sender;

use super::page_watch::PageWatch;
use super::slot::PageKey;

#[derive(Debug, Default)]
pub(super) struct PageIndex {
    by_key: HashMap<PageKey, u32>,
    slots: Vec<Option<Entry>>,
    /// Sorted by last use, and within a path from the last block to the first, because a block is useless without the
    /// blocks before it.
    by_use: BTreeSet<(u64, Reverse<u32>, u32)>,
    free: Vec<u32>,
    /// The time of the newest use.
    clock: u64,
    /// `None` without a subscriber to KV events.
    watch: Option<PageWatch>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: PageKey,
    depth: u32,
    used: u64,
}

impl PageIndex {
    /// An index that finds nothing and has no free slot.
    pub fn new(num_slots: u32) -> Self {
        Self {
            slots: vec![None; num_slots as usize],
            ..Self::default()
        }
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn slot(&self, key: PageKey) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// Returns a new time for the pages of a path. It is later than all times so far, including the times in the file.
    pub fn next_time(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Enters a page that a slot has. If two slots have the page, the one with the later use counts.
    pub fn insert(&mut self, slot: u32, key: PageKey, depth: u32, used: u64) {
        if let Some(there) = self.by_key.get(&key).copied() {
            let there_used = self.slots[there as usize].map_or(0, |entry| entry.used);
            if there_used >= used {
                return;
            }
            self.remove(there);
        }
        self.clock = self.clock.max(used);
        self.by_key.insert(key, slot);
        self.slots[slot as usize] = Some(Entry { key, depth, used });
        self.by_use.insert((used, Reverse(depth), slot));
        if let Some(watch) = &mut self.watch {
            watch.note_stored(depth, slot);
        }
    }

    /// Frees the slots of a range that have no page.
    pub fn free_slots(&mut self, slots: Range<u32>) {
        self.free.retain(|slot| !slots.contains(slot));
        let empty = |slot: &u32| self.slots[*slot as usize].is_none();
        let mut free: Vec<_> = slots.rev().filter(empty).collect();
        free.append(&mut self.free);
        self.free = free;
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn touch(&mut self, key: PageKey, time: u64) {
        if let Some(&slot) = self.by_key.get(&key)
            && let Some(entry) = &mut self.slots[slot as usize]
        {
            self.by_use
                .remove(&(entry.used, Reverse(entry.depth), slot));
            entry.used = time;
            self.by_use.insert((time, Reverse(entry.depth), slot));
        }
    }

    /// Returns a slot for another page: a free slot, or the least recently used one if its last use was before `time`.
    /// The index forgets the page in that slot.
    pub fn take_slot(&mut self, time: u64) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let &(used, _, slot) = self.by_use.first()?;
        (used < time).then(|| {
            self.remove(slot);
            slot
        })
    }

    pub fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Forgets a page that proved absent, unless its slot has another page by now.
    pub fn forget(&mut self, key: PageKey, slot: u32) {
        if self.by_key.get(&key) == Some(&slot) {
            self.remove(slot);
            self.free.push(slot);
        }
    }

    fn remove(&mut self, slot: u32) {
        if let Some(entry) = self.slots[slot as usize].take() {
            self.by_key.remove(&entry.key);
            self.by_use
                .remove(&(entry.used, Reverse(entry.depth), slot));
            if let Some(watch) = &mut self.watch {
                watch.note_removed(entry.depth, slot);
            }
        }
    }

    /// Forgets all pages. No slot is free afterwards.
    pub fn clear(&mut self) {
        let clock = self.clock;
        let mut watch = self.watch.take();
        if let Some(watch) = &mut watch {
            watch.note_cleared();
        }
        *self = Self::new(self.slots.len() as u32);
        (self.clock, self.watch) = (clock, watch);
    }

    /// Begins to report pages, beginning with those in the file. `bell` wakes the subscriber.
    pub fn watch(&mut self, bell: Sender<()>) {
        self.watch = Some(PageWatch::new(bell));
        self.tell_again();
    }

    pub fn watch_mut(&mut self) -> Option<&mut PageWatch> {
        self.watch.as_mut()
    }

    /// Retracts all announced blocks, to announce the blocks of the file again later.
    pub fn tell_again(&mut self) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        watch.note_cleared();
        for (slot, entry) in (0..).zip(&self.slots) {
            if let Some(entry) = entry {
                watch.note_stored(entry.depth, slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use corella_core::PageHash;

    use super::*;

    fn key(hash: u128) -> PageKey {
        PageKey {
            hash: PageHash(hash),
            group: 0,
        }
    }

    /// Four slots: a path of two blocks, a later path of one block, and a slot without a page.
    fn found() -> PageIndex {
        let mut index = PageIndex::new(4);
        index.insert(2, key(20), 0, 5);
        index.insert(0, key(21), 1, 5);
        index.insert(3, key(30), 0, 6);
        index
    }

    fn index() -> PageIndex {
        let mut index = found();
        index.free_slots(0..4);
        index
    }

    #[test]
    fn the_end_of_the_oldest_path_goes_first() {
        let mut index = index();
        let time = index.next_time();
        assert_eq!(time, 7);
        let slots = [1, 0, 2, 3].map(|_| index.take_slot(time));
        assert_eq!(slots, [Some(1), Some(0), Some(2), Some(3)]);
        assert_eq!((index.take_slot(time), index.len()), (None, 0));
    }

    #[test]
    fn a_block_that_was_used_outlives_others() {
        let mut index = index();
        let time = index.next_time();
        index.touch(key(20), time);
        index.touch(key(99), time);
        let slots = [1, 0, 3].map(|_| index.take_slot(time));
        assert_eq!(slots, [Some(1), Some(0), Some(3)]);
        assert_eq!(
            index.take_slot(time),
            None,
            "the path that is being stored stays"
        );
        assert_eq!(index.slot(key(20)), Some(2));
    }

    #[test]
    fn of_two_slots_with_one_block_the_newer_counts() {
        let mut index = found();
        index.insert(1, key(30), 0, 4);
        assert_eq!(index.slot(key(30)), Some(3));
        index.insert(1, key(30), 0, 8);
        assert_eq!(index.slot(key(30)), Some(1));
        index.free_slots(0..4);
        // The other slot is free. A late report about it changes nothing.
        index.forget(key(30), 3);
        assert_eq!(index.take_slot(9), Some(3));
        index.forget(key(30), 1);
        assert_eq!((index.slot(key(30)), index.take_slot(9)), (None, Some(1)));
    }
    #[test]
    fn slots_become_free_in_steps() {
        let mut index = PageIndex::new(5);
        assert_eq!(index.take_slot(9), None);
        index.free_slots(0..2);
        assert_eq!(index.take_slot(9), Some(0));
        index.free_slots(2..4);
        assert_eq!(index.num_free(), 3);
        // Free slots stay free once.
        index.free_slots(1..4);
        assert_eq!(index.num_free(), 3);
        assert_eq!(
            [9; 4].map(|time| index.take_slot(time)),
            [Some(1), Some(2), Some(3), None]
        );
        index.insert(1, key(20), 0, 5);
        index.clear();
        assert_eq!((index.len(), index.take_slot(9)), (0, None));
    }
}
