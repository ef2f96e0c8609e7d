//! The pages in a file: how they are written, found again and read.
//!
//! A page is right or absent, whatever is lost when the process or the machine stops: its rows are synchronised before
//! its header is written, and a reader compares the header's tokens, and checks the checksums of header and rows.
//!
//! The file grows in steps when pages need more slots. Disk space is reserved for each step before slots are used.

use std::io;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::{KvGroup, PageHash};

use super::file_layer::FileLayer;
use super::label::{KvDiskLabel, LABEL_BYTES, write_label};
use super::page_index::PageIndex;
use super::slot::{PageKey, PageName, SlotShape};

mod event;

pub(super) struct PageStore<F> {
    file: F,
    shape: SlotShape,
    groups: Vec<KvGroup>,
    num_state_parts: StateParts,
    label: Vec<u8>,
    /// The number of slots for which the configured size has room.
    num_slots: u32,
    /// The number of slots, from the first on, whose disk space is reserved.
    num_reserved: AtomicU32,
    /// Whether the file could not grow as far as it needed.
    is_short: AtomicBool,
    index: Mutex<PageIndex>,
    /// Counts erasures.
    epoch: AtomicU64,
    /// Locked while something is written.
    writing: Mutex<()>,
}

/// Maps a number of blocks to the number of pages that the recurrent state after these blocks takes. `None` for models
/// without recurrent layers.
///
/// The parts of a state are pages of the last block, in groups after the KV groups. A state without all of its parts is
/// absent.
pub(super) type StateParts = Option<Box<dyn Fn(u32) -> u32 + Send + Sync>>;

/// The number of steps in which a file grows to its size.
const NUM_STEPS: u32 = 8;

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    Rows(&'a [u8]),
    Nothing,
    /// The slot does not hold the page that the index expects there.
    Damaged,
}

impl<F: FileLayer> PageStore<F> {
    /// Returns an empty store that uses at most `max_bytes` of the file. [`scan`](Self::scan) finds the pages in the
    /// file.
    pub fn new(
        file: F,
        shape: SlotShape,
        groups: Vec<KvGroup>,
        num_state_parts: StateParts,
        label: &KvDiskLabel,
        max_bytes: u64,
    ) -> Self {
        let slots_bytes = max_bytes.saturating_sub(LABEL_BYTES as u64);
        let num_slots = slots_bytes / shape.slot_bytes() as u64;
        let num_slots = u32::try_from(num_slots).unwrap_or(u32::MAX);
        Self {
            file,
            shape,
            groups,
            num_state_parts,
            label: write_label(shape, label),
            num_slots,
            num_reserved: AtomicU32::new(0),
            is_short: AtomicBool::new(false),
            index: Mutex::new(PageIndex::new(num_slots)),
            epoch: AtomicU64::new(0),
            writing: Mutex::new(()),
        }
    }

    pub fn num_slots(&self) -> u32 {
        self.num_slots
    }

    /// The number of slots whose disk space is reserved.
    pub fn num_reserved(&self) -> u32 {
        self.num_reserved.load(Ordering::Relaxed)
    }

    /// The number of pages for which there is room, as far as is known.
    pub fn max_pages(&self) -> u32 {
        match self.is_short.load(Ordering::Relaxed) {
            true => self.num_reserved(),
            false => self.num_slots,
        }
    }

    /// The limit of pages of a path. A file without slots may get some for the next path.
    pub fn room(&self) -> u32 {
        match self.max_pages() {
            0 => self.step(),
            max_pages => max_pages,
        }
    }

    pub fn slot_bytes(&self) -> usize {
        self.shape.slot_bytes()
    }

    pub fn num_pages(&self) -> usize {
        self.index().len()
    }

    /// Reserves disk space for the first slots, unless the file has some, and labels the file.
    pub fn prepare(&self) -> io::Result<()> {
        self.reserve(self.step())?;
        let mut label = vec![0; LABEL_BYTES];
        let is_there = self.file.read_at(&mut label, 0).is_ok() && label == self.label;
        match is_there || self.num_reserved() == 0 {
            true => Ok(()),
            false => self.write_label(),
        }
    }

    fn write_label(&self) -> io::Result<()> {
        self.file.write_at(&self.label, 0)?;
        self.file.sync()
    }

    /// The number of slots by which the file grows.
    fn step(&self) -> u32 {
        self.num_slots.div_ceil(NUM_STEPS)
    }

    /// Reserves the disk space of the first `num_slots` slots, or of fewer slots if the disk has no more room.
    fn reserve(&self, num_slots: u32) -> io::Result<()> {
        let len = self.file.reserve(self.at(num_slots))?;
        let slots_bytes = len.saturating_sub(LABEL_BYTES as u64);
        let num_there = slots_bytes / self.shape.slot_bytes() as u64;
        let num_there = num_there.min(self.num_slots.into()) as u32;
        self.is_short
            .store(num_there < num_slots, Ordering::Relaxed);
        self.num_reserved.store(num_there, Ordering::Relaxed);
        Ok(())
    }

    /// Reserves the disk space of further slots until all of `pages` have a slot, as far as there is room.
    fn grow_for(&self, pages: &[PageName]) -> io::Result<()> {
        loop {
            let index = self.index();
            let new = pages.iter().filter(|page| index.slot(page.key).is_none());
            let has_slots = new.count() <= index.num_free();
            drop(index);
            let before = self.num_reserved();
            if has_slots || before == self.num_slots {
                return Ok(());
            }
            self.reserve(self.num_slots.min(before + self.step()))?;
            let after = self.num_reserved();
            if after <= before {
                return Ok(());
            }
            self.index().free_slots(before..after);
        }
    }

    /// Finds the pages in the file, one after the other. Nothing may be stored before the scan has returned.
    pub fn scan(&self, is_stopping: &AtomicBool) -> io::Result<()> {
        let mut header = vec![0; self.shape.header_bytes()];
        for slot in 0..self.num_reserved() {
            if is_stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            // The file may be erased meanwhile, but not between a read and its entry in the index.
            let _writing = self.lock_writing();
            match self.file.read_at(&mut header, self.at(slot)) {
                Ok(()) => {}
                // The file was cut off.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            if let Some(found) = self.shape.read_header(&header) {
                let mut index = self.index();
                index.insert(slot, found.key, found.depth, found.generation);
            }
        }
        let _writing = self.lock_writing();
        self.index().free_slots(0..self.num_reserved());
        Ok(())
    }

    /// The length, in blocks, of the longest prefix of a path after which a request can continue, if it has the blocks
    /// before `first` and reads the others from this store.
    pub fn num_usable(&self, hashes: &[PageHash], first: u32) -> u32 {
        let index = self.index();
        let is_missing = |at: usize, group: u32| {
            let hash = hashes[at];
            index.slot(PageKey { hash, group }).is_none()
        };
        let mut end = hashes.len();
        let groups = (0..).zip(&self.groups);
        let (windowed, whole): (Vec<_>, Vec<_>) =
            groups.partition(|(_, kv_group)| kv_group.window.is_some());
        for (group, _) in whole {
            let missing = (first as usize..end).find(|&at| is_missing(at, group));
            end = missing.unwrap_or(end);
        }
        loop {
            let missing = windowed.iter().filter_map(|&(group, kv_group)| {
                let first_read = self.first_block_read(*kv_group, end).max(first as usize);
                (first_read..end).rev().find(|&at| is_missing(at, group))
            });
            // Queries after any longer prefix up to the end also read the missing page, so the prefix must end before
            // this page.
            match missing.min() {
                Some(missing) => end = missing,
                None if end > first as usize && !self.has_state(&index, &hashes[..end]) => end -= 1,
                None => return end as u32,
            }
        }
    }

    fn has_state(&self, index: &PageIndex, hashes: &[PageHash]) -> bool {
        let is_there = |group| {
            let hash = hashes[hashes.len() - 1];
            index.slot(PageKey { hash, group }).is_some()
        };
        // Most blocks have no state, and counting a state's parts takes longer than looking for its first part.
        self.num_state_parts.is_none()
            || is_there(self.groups.len() as u32)
                && self.state_groups(hashes.len() as u32).all(is_there)
    }

    /// The groups of the parts of the state after `num_blocks` blocks.
    pub fn state_groups(&self, num_blocks: u32) -> Range<u32> {
        let first = self.groups.len() as u32;
        let num_parts = match &self.num_state_parts {
            Some(num_parts) if num_blocks > 0 => num_parts(num_blocks),
            _ => 0,
        };
        first..first + num_parts
    }

    /// Chooses the recurrent states along a path that are worth their bytes. `states` has the number of blocks before
    /// each candidate, smallest first. The last candidate is always chosen. Another one is chosen if the rows since the
    /// previous state, chosen or stored, take at least as many bytes as the state. So all states but the last take no
    /// more bytes than the rows.
    pub fn choose_states(&self, hashes: &[PageHash], states: &[u32]) -> Vec<u32> {
        let index = self.index();
        let has_state = |&end: &u32| self.has_state(&index, &hashes[..end as usize]);
        let mut chosen = Vec::new();
        let mut before = 0;
        for &end in states {
            let stored = (before + 1..=end).rev().find(has_state);
            before = stored.unwrap_or(before);
            let rows = self.rows_behind(before, end);
            let num_pages: usize = rows.map(|(_, blocks)| blocks.len()).sum();
            if num_pages >= self.state_groups(end).len() || states.last() == Some(&end) {
                chosen.push(end);
                before = end;
            }
        }
        chosen
    }

    /// The number of blocks of a path before the first missing page. Only pages count that queries read after one of
    /// the prefixes whose lengths are in `ends`.
    pub fn num_before_missing(&self, hashes: &[PageHash], ends: &[u32]) -> u32 {
        let index = self.index();
        let missing = self
            .keys(hashes, ends)
            .filter(|(_, key)| index.slot(*key).is_none());
        let first = missing.map(|(at, _)| at as u32).min();
        first.or(ends.last().copied()).unwrap_or(0)
    }

    pub fn has(&self, key: PageKey) -> bool {
        self.index().slot(key).is_some()
    }

    /// Whether the file has room for all pages that queries read after the prefixes whose lengths are in `ends`.
    pub fn has_room_for(&self, hashes: &[PageHash], ends: &[u32]) -> bool {
        self.keys(hashes, ends).count() <= self.room() as usize
    }

    /// The pages that queries read after the prefixes of a path whose lengths are in `ends`, each page with the number
    /// of blocks before it. `ends` is sorted.
    fn keys<'a>(
        &'a self,
        hashes: &'a [PageHash],
        ends: &'a [u32],
    ) -> impl Iterator<Item = (usize, PageKey)> + 'a {
        let key = move |at: u32, group| {
            let at = at as usize;
            let hash = hashes[at];
            (at, PageKey { hash, group })
        };
        let befores = iter::once(0).chain(ends.iter().copied());
        befores.zip(ends).flat_map(move |(before, &end)| {
            let state = self.state_groups(end);
            let state = state.map(move |group| (group, end - 1..end));
            let pages = self.rows_behind(before, end).chain(state);
            pages.flat_map(move |(group, blocks)| blocks.map(move |at| key(at, group)))
        })
    }

    /// For each group, the blocks that a query after `end` blocks reads, without the first `before` blocks.
    fn rows_behind(&self, before: u32, end: u32) -> impl Iterator<Item = (u32, Range<u32>)> + '_ {
        (0..).zip(&self.groups).map(move |(group, kv_group)| {
            let first = self.first_block_read(*kv_group, end as usize) as u32;
            (group, first.max(before)..end)
        })
    }

    fn first_block_read(&self, group: KvGroup, num_blocks: usize) -> usize {
        let page_size = self.shape.page_size;
        group.first_page_read(num_blocks as u32 * page_size, page_size) as usize
    }

    /// Begins to store or to read a path: its pages count as used now.
    pub fn begin_path(&self, hashes: &[PageHash]) -> u64 {
        let mut index = self.index();
        let time = index.next_time();
        for (_, key) in self.keys(hashes, &[hashes.len() as u32]) {
            index.touch(key, time);
        }
        time
    }

    /// A count that grows when the store is erased.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Stores the pages that are not stored yet, with the time of their path. `rows` has the rows of all `pages`, one
    /// after the other. Nothing is stored if the store was erased since `epoch`. Returns the number of new pages.
    pub fn store(&self, pages: &[PageName], rows: &[u8], time: u64, epoch: u64) -> io::Result<u32> {
        let _writing = self.lock_writing();
        if self.epoch() != epoch {
            return Ok(0);
        }
        self.grow_for(pages)?;
        let mut writes = Vec::with_capacity(pages.len());
        for (page, rows) in pages.iter().zip(rows.chunks_exact(self.shape.row_bytes)) {
            let mut index = self.index();
            if index.slot(page.key).is_some() {
                continue;
            }
            let Some(slot) = index.take_slot(time) else {
                break;
            };
            writes.push((slot, page, rows));
        }
        let written = self.write(&writes, time);
        let mut index = self.index();
        for &(slot, page, _) in &writes {
            match &written {
                Ok(()) => index.insert(slot, page.key, page.depth, time),
                Err(_) => index.give_back(slot),
            }
        }
        written.map(|()| writes.len() as u32)
    }

    fn write(&self, writes: &[(u32, &PageName, &[u8])], time: u64) -> io::Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let header_bytes = self.shape.header_bytes() as u64;
        for &(slot, _, rows) in writes {
            self.file.write_at(rows, self.at(slot) + header_bytes)?;
        }
        self.file.sync()?;
        for &(slot, page, rows) in writes {
            let header = self.shape.header(page, time, rows);
            self.file.write_at(&header, self.at(slot))?;
        }
        self.file.sync()
    }

    /// Reads a page into `slot`, a buffer of [`slot_bytes`](Self::slot_bytes) bytes.
    pub fn read<'a>(&self, page: &PageName, slot: &'a mut [u8]) -> io::Result<Found<'a>> {
        let Some(at) = self.index().slot(page.key) else {
            return Ok(Found::Nothing);
        };
        let is_there = match self.file.read_at(slot, self.at(at)) {
            Ok(()) => self.shape.rows(slot, page).is_some(),
            // The file was cut off.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
        };
        if is_there {
            let rows_at = self.shape.header_bytes();
            return Ok(Found::Rows(&slot[rows_at..rows_at + self.shape.row_bytes]));
        }
        let mut index = self.index();
        // Another page may have got the slot meanwhile.
        let is_damaged = index.slot(page.key) == Some(at);
        index.forget(page.key, at);
        Ok(match is_damaged {
            true => Found::Damaged,
            false => Found::Nothing,
        })
    }

    /// Forgets all pages, in memory and in the file. After a crash meanwhile, the file may still have some of them.
    pub fn erase(&self) -> io::Result<()> {
        let _writing = self.lock_writing();
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.num_reserved.store(0, Ordering::Relaxed);
        self.index().clear();
        self.file.clear()?;
        self.reserve(self.step())?;
        self.index().free_slots(0..self.num_reserved());
        self.write_label()
    }

    /// Rewrites the label, to see whether the disk takes writes.
    pub fn try_to_write(&self) -> io::Result<()> {
        let _writing = self.lock_writing();
        self.write_label()
    }

    /// Erases the pages of an adapter. Paths that are being stored are given up.
    ///
    /// Reads the headers of all slots, because the file may also have an older copy of a page, which the index does not
    /// know.
    pub fn erase_adapter(&self, adapter: u128) -> io::Result<()> {
        let _writing = self.lock_writing();
        self.epoch.fetch_add(1, Ordering::Relaxed);
        let mut header = vec![0; self.shape.header_bytes()];
        let empty = vec![0; self.shape.slot_bytes()];
        for slot in 0..self.num_reserved() {
            self.file.read_at(&mut header, self.at(slot))?;
            let found = self.shape.read_header(&header);
            if let Some(found) = found.filter(|found| found.adapter == adapter) {
                self.index().forget(found.key, slot);
                self.file.write_at(&empty, self.at(slot))?;
            }
        }
        self.file.sync()
    }

    fn at(&self, slot: u32) -> u64 {
        LABEL_BYTES as u64 + u64::from(slot) * self.shape.slot_bytes() as u64
    }

    fn index(&self) -> MutexGuard<'_, PageIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
