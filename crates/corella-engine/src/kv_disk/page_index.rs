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
    disks: Vec<DiskSlots>,
    /// The time of the newest use.
    clock: u64,
    /// `None` without a subscriber to KV events.
    watch: Option<PageWatch>,
}

/// The slots of a disk.
#[derive(Debug)]
struct DiskSlots {
    range: Range<u32>,
    free: Vec<u32>,
    /// The index ignores the slots of a closed disk.
    is_open: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: PageKey,
    depth: u32,
    used: u64,
}

impl PageIndex {
    /// An index that finds nothing and has no free slot. `ranges` has the slots of each disk, one after the other. All
    /// disks are closed.
    pub fn new(ranges: impl IntoIterator<Item = Range<u32>>) -> Self {
        let disk = |range| DiskSlots {
            range,
            free: Vec::new(),
            is_open: false,
        };
        let disks: Vec<_> = ranges.into_iter().map(disk).collect();
        let num_slots = disks.last().map_or(0, |disk| disk.range.end);
        Self {
            slots: vec![None; num_slots as usize],
            disks,
            ..Self::default()
        }
    }

    /// Begins to use a disk. If it was closed, it has neither pages nor free slots.
    pub fn open_disk(&mut self, disk: usize) {
        if !self.is_open(disk) {
            self.clear_disk(disk);
        }
        self.disks[disk].is_open = true;
    }

    /// Ignores a disk until it is opened again. Its pages are absent, and [`forget_closed`](Self::forget_closed) drops
    /// their entries.
    pub fn close_disk(&mut self, disk: usize) {
        self.disks[disk].free = Vec::new();
        self.disks[disk].is_open = false;
    }

    /// Drops the entries of a closed disk's slots in a range. Returns false if the disk is open again.
    pub fn forget_closed(&mut self, disk: usize, slots: Range<u32>) -> bool {
        if self.is_open(disk) {
            return false;
        }
        for slot in slots {
            self.remove(slot);
        }
        true
    }

    /// Forgets the pages of a disk. None of its slots is free afterwards.
    pub fn clear_disk(&mut self, disk: usize) {
        for slot in self.disks[disk].range.clone() {
            self.remove(slot);
        }
        self.disks[disk].free = Vec::new();
    }

    pub fn is_open(&self, disk: usize) -> bool {
        self.disks[disk].is_open
    }

    pub fn num_open(&self) -> usize {
        self.disks.iter().filter(|disk| disk.is_open).count()
    }

    /// The disk of a slot.
    pub fn disk_of(&self, slot: u32) -> usize {
        self.disks.partition_point(|disk| disk.range.end <= slot)
    }

    /// The number of pages, with those of a closed disk that are not forgotten yet.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn slot(&self, key: PageKey) -> Option<u32> {
        let slot = self.by_key.get(&key).copied()?;
        self.is_open(self.disk_of(slot)).then_some(slot)
    }

    /// Returns a new time for the pages of a path. It is later than all times so far, including the times in the file.
    pub fn next_time(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Enters a page that a slot has. If two slots have the page, the one with the later use counts.
    pub fn insert(&mut self, slot: u32, key: PageKey, depth: u32, used: u64) {
        if !self.is_open(self.disk_of(slot)) {
            return;
        }
        if let Some(there) = self.by_key.get(&key).copied() {
            let there_used = self.slots[there as usize].map_or(0, |entry| entry.used);
            if there_used >= used && self.is_open(self.disk_of(there)) {
                return;
            }
            self.remove(there);
            self.give_back(there);
        }
        self.clock = self.clock.max(used);
        self.by_key.insert(key, slot);
        self.slots[slot as usize] = Some(Entry { key, depth, used });
        self.by_use.insert((used, Reverse(depth), slot));
        if let Some(watch) = &mut self.watch {
            watch.note_stored(depth, slot);
        }
    }

    /// Frees the slots of a range that have no page. The range is of one disk.
    pub fn free_slots(&mut self, slots: Range<u32>) {
        let disk = self.disk_of(slots.start);
        let Some(disk) = self.disks.get_mut(disk).filter(|disk| disk.is_open) else {
            return;
        };
        disk.free.retain(|slot| !slots.contains(slot));
        let empty = |slot: &u32| self.slots[*slot as usize].is_none();
        let mut free: Vec<_> = slots.rev().filter(empty).collect();
        free.append(&mut disk.free);
        disk.free = free;
    }

    pub fn num_free(&self) -> usize {
        self.disks.iter().map(|disk| disk.free.len()).sum()
    }

    pub fn touch(&mut self, key: PageKey, time: u64) {
        if let Some(&slot) = self.by_key.get(&key)
            && let Some(entry) = &mut self.slots[slot as usize]
            && entry.used < time
        {
            self.by_use
                .remove(&(entry.used, Reverse(entry.depth), slot));
            entry.used = time;
            self.by_use.insert((time, Reverse(entry.depth), slot));
        }
    }

    /// Returns a slot for another page: a free slot, or the least recently used one if its last use was before `time`.
    /// The index forgets the page in that slot.
    ///
    /// A free slot comes from the disk with the largest share of free slots. So disks fill at the same pace, and a path
    /// lies on all of them and is read at the sum of their speeds. A lost disk costs a part of most paths.
    pub fn take_slot(&mut self, time: u64) -> Option<u32> {
        let free_share = |a: &&mut DiskSlots, b: &&mut DiskSlots| {
            let product = |free: &DiskSlots, all: &DiskSlots| free.free.len() * all.range.len();
            product(a, b).cmp(&product(b, a))
        };
        let disks = self.disks.iter_mut().rev();
        // The first of equal disks counts.
        let emptiest = disks
            .filter(|disk| !disk.free.is_empty())
            .max_by(free_share);
        if let Some(slot) = emptiest.and_then(|disk| disk.free.pop()) {
            return Some(slot);
        }
        loop {
            let &(used, _, slot) = self.by_use.first()?;
            if used >= time {
                return None;
            }
            self.remove(slot);
            if self.is_open(self.disk_of(slot)) {
                return Some(slot);
            }
        }
    }

    pub fn give_back(&mut self, slot: u32) {
        let disk = self.disk_of(slot);
        let disk = &mut self.disks[disk];
        if disk.is_open {
            disk.free.push(slot);
        }
    }

    /// Forgets a page that proved absent, unless its slot has another page by now.
    pub fn forget(&mut self, key: PageKey, slot: u32) {
        if self.by_key.get(&key) == Some(&slot) {
            self.remove(slot);
            self.give_back(slot);
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

    /// Begins to report pages, beginning with those in the file. `bell` wakes the subscriber.
    pub fn watch(&mut self, bell: Sender<()>) {
        let mut watch = PageWatch::new(bell);
        for (slot, entry) in (0..).zip(&self.slots) {
            if let Some(entry) = entry {
                watch.note_stored(entry.depth, slot);
            }
        }
        self.watch = Some(watch);
    }

    pub fn watch_mut(&mut self) -> Option<&mut PageWatch> {
        self.watch.as_mut()
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

    /// An index of open disks with these numbers of slots.
    fn open_index(nums_slots: &[u32]) -> PageIndex {
        let ranges = nums_slots.iter().scan(0, |first, num| {
            let range = *first..*first + num;
            *first = range.end;
            Some(range)
        });
        let mut index = PageIndex::new(ranges);
        for disk in 0..nums_slots.len() {
            index.open_disk(disk);
        }
        index
    }

    /// Four slots: a path of two blocks, a later path of one block, and a slot without a page.
    fn found() -> PageIndex {
        let mut index = open_index(&[4]);
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
        let mut index = open_index(&[5]);
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
        index.clear_disk(0);
        assert_eq!((index.len(), index.take_slot(9)), (0, None));
    }

    /// The second disk has twice the slots of the first.
    #[test]
    fn disks_fill_at_the_same_pace() {
        let mut index = open_index(&[2, 4]);
        index.free_slots(0..2);
        index.free_slots(2..6);
        let slots = [(); 6].map(|()| index.take_slot(9));
        assert_eq!(slots, [0, 2, 3, 1, 4, 5].map(Some));
        assert_eq!(index.take_slot(9), None);
    }

    #[test]
    fn a_closed_disk_loses_its_pages_and_takes_none() {
        let mut index = open_index(&[2, 2]);
        for (slot, page, used) in [(0, 20, 5), (1, 21, 6), (2, 30, 7)] {
            index.insert(slot, key(page), 0, used);
        }
        index.free_slots(2..4);
        index.close_disk(0);
        let slots = [20, 21, 30].map(|page| index.slot(key(page)));
        assert_eq!((slots, index.num_open()), ([None, None, Some(2)], 1));
        // A write to the disk ends late, whether it succeeds or fails.
        index.insert(0, key(22), 0, 8);
        index.give_back(1);
        index.free_slots(0..2);
        assert_eq!((index.slot(key(22)), index.num_free()), (None, 1));
        assert_eq!(
            [9; 3].map(|time| index.take_slot(time)),
            [Some(3), Some(2), None]
        );
        // The disk comes back with a page that another disk has by now, and with a page that it has in an older state.
        index.insert(2, key(20), 0, 9);
        index.insert(3, key(21), 0, 4);
        index.open_disk(0);
        index.insert(0, key(20), 0, 5);
        index.insert(1, key(21), 0, 6);
        index.free_slots(0..2);
        assert_eq!(
            (index.slot(key(20)), index.slot(key(21))),
            (Some(2), Some(1))
        );
        assert_eq!(
            [9; 3].map(|time| index.take_slot(time)),
            [Some(0), Some(3), Some(1)]
        );
    }
    /// The entries of a large disk are dropped in parts.
    #[test]
    fn pages_of_a_closed_disk_are_absent_before_their_entries_are_dropped() {
        let mut index = open_index(&[3, 2]);
        for (slot, page) in [(0, 20), (1, 21), (2, 22)] {
            index.insert(slot, key(page), 0, 5);
        }
        index.close_disk(0);
        // A page of a path in use is stored again, on the other disk.
        index.touch(key(20), 9);
        index.insert(3, key(20), 0, 9);
        let slots = |index: &PageIndex| [20, 21, 22].map(|page| index.slot(key(page)));
        assert_eq!(slots(&index), [Some(3), None, None]);
        assert!(index.forget_closed(0, 0..2));
        assert_eq!((slots(&index), index.len()), ([Some(3), None, None], 2));
        index.open_disk(0);
        assert!(!index.forget_closed(0, 2..3), "the disk is in use");
        assert_eq!(index.len(), 1);
        index.insert(2, key(22), 0, 5);
        assert!(!index.forget_closed(0, 2..3));
        assert_eq!(slots(&index), [Some(3), None, Some(2)]);
    }
}
