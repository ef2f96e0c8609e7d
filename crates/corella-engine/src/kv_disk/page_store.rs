//! The pages on the disks: how they are written, found again and read.
//!
//! A page is right or absent, whatever is lost when the process or the machine stops: its rows are synchronised before
//! its header is written, and a reader compares the header's tokens, and checks the checksums of header and rows.
//!
//! All disks have one index, and each disk has a file with a range of the slots. If a disk fails, its pages leave the
//! index, and the others stay.

use std::io;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::{KvGroup, PageHash};

use super::file_layer::FileLayer;
use super::label::{KvDiskLabel, write_label};
use super::page_index::PageIndex;
use super::slot::{PageKey, PageName, SlotShape};
use super::slot_file::SlotFile;

mod event;

pub(super) struct PageStore<F> {
    files: Vec<SlotFile<F>>,
    shape: SlotShape,
    groups: Vec<KvGroup>,
    num_state_parts: StateParts,
    index: Mutex<PageIndex>,
    /// The number of disks in use. It follows the index.
    num_open: AtomicUsize,
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

/// An error of one of the disks, which are numbered. The disk is closed.
#[derive(Debug)]
pub(super) struct DiskError {
    pub disk: usize,
    pub error: io::Error,
}

/// The number of slots whose pages are forgotten at once when a disk is closed. The engine's loop waits for that.
const CLOSE_STEP: u32 = 4096;

/// The outcome of storing pages.
#[derive(Debug, Default)]
pub(super) struct Stored {
    /// The number of new pages.
    pub num_pages: u32,
    /// The disks that failed. Pages for these are not stored.
    pub failed: Vec<DiskError>,
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    Rows(&'a [u8]),
    Nothing,
    /// The slot does not hold the page that the index expects there.
    Damaged,
}

impl<F: FileLayer> PageStore<F> {
    /// Returns an empty store with a file of at most so many bytes for each disk. All disks are closed:
    /// [`open_disk`](Self::open_disk) finds the pages of one.
    pub fn new(
        shape: SlotShape,
        groups: Vec<KvGroup>,
        num_state_parts: StateParts,
        label: &KvDiskLabel,
        max_bytes: &[u64],
    ) -> Self {
        let mut files: Vec<SlotFile<F>> = Vec::new();
        for &max_bytes in max_bytes {
            let first = files.last().map_or(0, |file| file.slots().end);
            let label = write_label(shape, label);
            files.push(SlotFile::new(first, shape, label, max_bytes));
        }
        let index = PageIndex::new(files.iter().map(SlotFile::slots));
        Self {
            files,
            shape,
            groups,
            num_state_parts,
            index: Mutex::new(index),
            num_open: AtomicUsize::new(0),
            epoch: AtomicU64::new(0),
            writing: Mutex::new(()),
        }
    }

    pub fn num_disks(&self) -> usize {
        self.files.len()
    }

    pub fn file(&self, disk: usize) -> &SlotFile<F> {
        &self.files[disk]
    }

    /// The number of disks in use.
    pub fn num_open(&self) -> usize {
        self.num_open.load(Ordering::Relaxed)
    }

    pub fn is_open(&self, disk: usize) -> bool {
        self.index().is_open(disk)
    }

    /// The disks in use.
    pub fn open_disks(&self) -> Vec<usize> {
        let index = self.index();
        (0..self.num_disks())
            .filter(|&disk| index.is_open(disk))
            .collect()
    }

    /// The number of pages for which the disks in use have room, as far as is known.
    pub fn max_pages(&self) -> u32 {
        let files = self.open_disks().into_iter().map(|disk| &self.files[disk]);
        files.map(SlotFile::max_pages).sum()
    }

    /// The limit of pages of a path. Files without slots may get some for the next path.
    pub fn room(&self) -> u32 {
        match self.max_pages() {
            0 => self.files.iter().map(SlotFile::step).sum(),
            max_pages => max_pages,
        }
    }

    pub fn slot_bytes(&self) -> usize {
        self.shape.slot_bytes()
    }

    pub fn num_pages(&self) -> usize {
        self.index().len()
    }

    /// Begins to use a disk whose file is [set](SlotFile::set). [`scan`](Self::scan) finds its pages.
    pub fn open_disk(&self, disk: usize) {
        let mut index = self.index();
        index.open_disk(disk);
        self.num_open.store(index.num_open(), Ordering::Relaxed);
    }

    /// Forgets the pages of a disk, which stay in its file, and uses the disk no longer.
    pub fn close_disk(&self, disk: usize) {
        let mut index = self.index();
        if !index.is_open(disk) {
            return;
        }
        index.close_disk(disk);
        self.num_open.store(index.num_open(), Ordering::Relaxed);
        drop(index);
        let slots = self.files[disk].slots();
        for first in slots.clone().step_by(CLOSE_STEP as usize) {
            let end = slots.end.min(first.saturating_add(CLOSE_STEP));
            if !self.index().forget_closed(disk, first..end) {
                return;
            }
        }
    }

    /// Closes a disk that has failed.
    fn fail(&self, disk: usize, error: io::Error) -> DiskError {
        self.close_disk(disk);
        DiskError { disk, error }
    }

    /// Reserves disk space for further slots until all of `pages` have a slot, as far as there is room. All disks grow
    /// by a step, so that they fill at the same pace. Returns the disks that failed.
    fn grow_for(&self, pages: &[PageName]) -> Vec<DiskError> {
        let mut growing = self.open_disks();
        let mut failed = Vec::new();
        while !growing.is_empty() {
            let index = self.index();
            let new = pages.iter().filter(|page| index.slot(page.key).is_none());
            let has_slots = new.count() <= index.num_free();
            drop(index);
            if has_slots {
                break;
            }
            growing.retain(|&disk| match self.files[disk].grow() {
                Ok(slots) if slots.is_empty() => false,
                Ok(slots) => {
                    self.index().free_slots(slots);
                    true
                }
                Err(error) => {
                    failed.push(self.fail(disk, error));
                    false
                }
            });
        }
        failed
    }

    /// Finds the pages on a disk, one after the other. Nothing may be stored before the scan has returned.
    pub fn scan(&self, disk: usize, is_stopping: &AtomicBool) -> io::Result<()> {
        let file = &self.files[disk];
        let mut header = vec![0; self.shape.header_bytes()];
        for slot in file.reserved() {
            if is_stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            // The file may be erased meanwhile, but not between a read and its entry in the index.
            let _writing = self.lock_writing();
            if !file.read(slot, &mut header)? {
                break;
            }
            if let Some(found) = self.shape.read_header(&header) {
                let mut index = self.index();
                index.insert(slot, found.key, found.depth, found.generation);
            }
        }
        let _writing = self.lock_writing();
        self.index().free_slots(file.reserved());
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

    /// The number of pages that a fetch of a path's blocks, without the first `first` blocks, reads from each disk.
    pub fn count_by_disk(&self, hashes: &[PageHash], first: u32) -> Vec<u32> {
        let mut counts = vec![0; self.num_disks()];
        let index = self.index();
        for (block, key) in self.keys(hashes, &[hashes.len() as u32]) {
            if let Some(slot) = index.slot(key)
                && block >= first as usize
            {
                counts[index.disk_of(slot)] += 1;
            }
        }
        counts
    }

    /// The block and the group of the last page of a path on a disk.
    pub fn last_on_disk(&self, hashes: &[PageHash], disk: usize) -> Option<(u32, u32)> {
        let index = self.index();
        let ends = [hashes.len() as u32];
        let keys = self.keys(hashes, &ends);
        let is_there = |key| {
            index
                .slot(key)
                .is_some_and(|slot| index.disk_of(slot) == disk)
        };
        let found = keys.filter(|&(_, key)| is_there(key));
        found.map(|(block, key)| (block as u32, key.group)).max()
    }

    /// The disks of pages. An absent page counts for the first disk.
    pub fn disks_of(&self, keys: impl Iterator<Item = PageKey>) -> Vec<usize> {
        let index = self.index();
        let disk = |key| index.slot(key).map_or(0, |slot| index.disk_of(slot));
        keys.map(disk).collect()
    }

    /// Whether the disks have room for all pages that queries read after the prefixes whose lengths are in `ends`.
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
        let time = self.index().next_time();
        self.touch_path(hashes, time);
        time
    }

    /// The pages of a path count as used at `time`, unless they were used later.
    pub fn touch_path(&self, hashes: &[PageHash], time: u64) {
        let mut index = self.index();
        for (_, key) in self.keys(hashes, &[hashes.len() as u32]) {
            index.touch(key, time);
        }
    }

    /// A count that grows when pages are erased.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Stores the pages that are not stored yet, with the time of their path. `rows` has the rows of all `pages`, one
    /// after the other. Nothing is stored if a disk was erased since `epoch`.
    pub fn store(&self, pages: &[PageName], rows: &[u8], time: u64, epoch: u64) -> Stored {
        let _writing = self.lock_writing();
        if self.epoch() != epoch {
            return Stored::default();
        }
        let mut stored = Stored {
            num_pages: 0,
            failed: self.grow_for(pages),
        };
        let mut writes: Vec<Vec<_>> = self.files.iter().map(|_| Vec::new()).collect();
        for (page, rows) in pages.iter().zip(rows.chunks_exact(self.shape.row_bytes)) {
            let mut index = self.index();
            if index.slot(page.key).is_some() {
                continue;
            }
            let Some(slot) = index.take_slot(time) else {
                break;
            };
            writes[index.disk_of(slot)].push((slot, page, rows));
        }
        for (disk, writes) in writes.iter().enumerate() {
            match self.files[disk].write(writes, time) {
                Ok(()) => {
                    let mut index = self.index();
                    for &(slot, page, _) in writes {
                        index.insert(slot, page.key, page.depth, time);
                    }
                    stored.num_pages += writes.len() as u32;
                }
                Err(error) => stored.failed.push(self.fail(disk, error)),
            }
        }
        stored
    }

    /// Begins to bring a page to memory, for a read that follows soon.
    pub fn read_ahead(&self, key: PageKey) {
        let found = {
            let index = self.index();
            { index.slot(key) }.map(|slot| (index.disk_of(slot), slot))
        };
        if let Some((disk, slot)) = found {
            self.files[disk].read_ahead(slot);
        }
    }

    /// Reads a page into `slot`, a buffer of [`slot_bytes`](Self::slot_bytes) bytes.
    pub fn read<'a>(&self, page: &PageName, slot: &'a mut [u8]) -> Result<Found<'a>, DiskError> {
        let (at, disk) = {
            let index = self.index();
            let Some(at) = index.slot(page.key) else {
                return Ok(Found::Nothing);
            };
            (at, index.disk_of(at))
        };
        let read = self.files[disk].read(at, slot);
        let is_whole = read.map_err(|error| self.fail(disk, error))?;
        if is_whole && self.shape.rows(slot, page).is_some() {
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

    /// Forgets all pages of some disks, in memory and in their files. Paths that are being stored are given up. After a
    /// crash meanwhile, the files may still have some pages. Returns the disks that failed.
    pub fn erase(&self, disks: &[usize]) -> Vec<DiskError> {
        self.erase_with(disks, |disk| {
            self.index().clear_disk(disk);
            self.files[disk].erase()?;
            self.index().free_slots(self.files[disk].reserved());
            Ok(())
        })
    }

    /// Erases the pages of an adapter on some disks. Paths that are being stored are given up. Returns the disks that
    /// failed.
    ///
    /// Reads the headers of all slots, because a file may also have an older copy of a page, which the index does not
    /// know.
    pub fn erase_adapter(&self, adapter: u128, disks: &[usize]) -> Vec<DiskError> {
        self.erase_with(disks, |disk| {
            let file = &self.files[disk];
            file.wipe(
                |header| header.adapter == adapter,
                |slot, header| self.index().forget(header.key, slot),
            )
        })
    }

    fn erase_with(
        &self,
        disks: &[usize],
        erase: impl Fn(usize) -> io::Result<()>,
    ) -> Vec<DiskError> {
        let _writing = self.lock_writing();
        self.epoch.fetch_add(1, Ordering::Relaxed);
        let failed = disks.iter().filter_map(|&disk| {
            let error = erase(disk).err()?;
            Some(self.fail(disk, error))
        });
        failed.collect()
    }

    /// Rewrites the label of a file, to see whether the disk takes writes. A disk that hangs then delays no erasure of
    /// the others: labels need no lock, because a file's label never changes.
    pub fn try_to_write(&self, disk: usize) -> io::Result<()> {
        self.files[disk].write_label()
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
