//! The blocks in a file: how they are written, found again and read.
//!
//! A block is right or absent, whatever is lost when the process or the machine stops: its rows are synchronised before
//! its header is written, and a reader compares the header's tokens and the checksums of both.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::PageHash;

use super::block_index::BlockIndex;
use super::file_layer::FileLayer;
use super::slot::{BlockName, SlotShape};

pub(super) struct BlockStore<F> {
    file: F,
    shape: SlotShape,
    num_slots: u32,
    index: Mutex<BlockIndex>,
    /// Counts erasures.
    epoch: AtomicU64,
    /// Locked while something is written.
    writing: Mutex<()>,
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    Rows(&'a [u8]),
    Nothing,
    /// The slot has something else than it should.
    Damaged,
}

impl<F: FileLayer> BlockStore<F> {
    /// An empty store; [`scan`](Self::scan) finds the blocks of the file. At most `max_bytes` are used.
    pub fn new(file: F, shape: SlotShape, max_bytes: u64) -> Self {
        let num_slots = max_bytes / shape.slot_bytes() as u64;
        let num_slots = u32::try_from(num_slots).unwrap_or(u32::MAX);
        Self {
            file,
            shape,
            num_slots,
            index: Mutex::new(BlockIndex::new(num_slots)),
            epoch: AtomicU64::new(0),
            writing: Mutex::new(()),
        }
    }

    pub fn num_slots(&self) -> u32 {
        self.num_slots
    }

    pub fn slot_bytes(&self) -> usize {
        self.shape.slot_bytes()
    }

    pub fn num_blocks(&self) -> usize {
        self.index().len()
    }

    /// Takes all room that the blocks may need.
    pub fn preallocate(&self) -> io::Result<()> {
        self.file.resize(self.at(self.num_slots))
    }

    /// Finds the blocks in the file, one after the other. Until it returns, nothing may be stored.
    pub fn scan(&self, is_stopping: &AtomicBool) -> io::Result<()> {
        let mut header = vec![0; self.shape.header_bytes()];
        for slot in 0..self.num_slots {
            if is_stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            match self.file.read_at(&mut header, self.at(slot)) {
                Ok(()) => {}
                // The file was cut off.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            if let Some(found) = self.shape.read_header(&header) {
                let mut index = self.index();
                index.insert(slot, found.hash, found.depth, found.generation);
            }
        }
        self.index().free_others();
        Ok(())
    }

    /// The number of blocks from `first` on that are here without a gap.
    pub fn num_here(&self, hashes: &[PageHash], first: u32) -> u32 {
        let index = self.index();
        let is_here = |hash: &&PageHash| index.slot(**hash).is_some();
        let hashes = hashes.get(first as usize..).unwrap_or_default();
        hashes.iter().take_while(is_here).count() as u32
    }

    /// Begins to store or to read a path: its blocks count as used now.
    pub fn begin_path(&self, hashes: &[PageHash]) -> u64 {
        let mut index = self.index();
        let time = index.next_time();
        for &hash in hashes {
            index.touch(hash, time);
        }
        time
    }

    /// A number that changes when the store is erased.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Stores the blocks that are not stored yet, with the time of their path. `rows` has the rows of all `blocks`, one
    /// after the other. Nothing is stored if the store was erased since `epoch`. Returns the number of new blocks.
    pub fn store(
        &self,
        blocks: &[BlockName],
        rows: &[u8],
        time: u64,
        epoch: u64,
    ) -> io::Result<u32> {
        let _writing = self.lock_writing();
        if self.epoch() != epoch {
            return Ok(0);
        }
        let mut writes = Vec::with_capacity(blocks.len());
        for (block, rows) in blocks.iter().zip(rows.chunks_exact(self.shape.row_bytes)) {
            let mut index = self.index();
            if index.slot(block.hash).is_some() {
                continue;
            }
            let Some(slot) = index.take_slot(time) else {
                break;
            };
            writes.push((slot, block, rows));
        }
        let written = self.write(&writes, time);
        let mut index = self.index();
        for &(slot, block, _) in &writes {
            match &written {
                Ok(()) => index.insert(slot, block.hash, block.depth, time),
                Err(_) => index.give_back(slot),
            }
        }
        written.map(|()| writes.len() as u32)
    }

    fn write(&self, writes: &[(u32, &BlockName, &[u8])], time: u64) -> io::Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let header_bytes = self.shape.header_bytes() as u64;
        for &(slot, _, rows) in writes {
            self.file.write_at(rows, self.at(slot) + header_bytes)?;
        }
        self.file.sync()?;
        for &(slot, block, rows) in writes {
            let header = self.shape.header(block, time, rows);
            self.file.write_at(&header, self.at(slot))?;
        }
        self.file.sync()
    }

    /// Reads a block into `slot`, which has the bytes of one.
    pub fn read<'a>(&self, block: &BlockName, slot: &'a mut [u8]) -> io::Result<Found<'a>> {
        let Some(at) = self.index().slot(block.hash) else {
            return Ok(Found::Nothing);
        };
        let is_there = match self.file.read_at(slot, self.at(at)) {
            Ok(()) => self.shape.rows(slot, block).is_some(),
            // The file was cut off.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
        };
        if is_there {
            let rows_at = self.shape.header_bytes();
            return Ok(Found::Rows(&slot[rows_at..rows_at + self.shape.row_bytes]));
        }
        let mut index = self.index();
        // Another block may have got the slot meanwhile.
        let is_damaged = index.slot(block.hash) == Some(at);
        index.forget(block.hash, at);
        Ok(match is_damaged {
            true => Found::Damaged,
            false => Found::Nothing,
        })
    }

    /// Forgets all blocks, in the file as well. A crash may leave some of them.
    pub fn erase(&self) -> io::Result<()> {
        let _writing = self.lock_writing();
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.index().clear();
        self.file.resize(0)?;
        self.preallocate()?;
        self.file.sync()
    }

    /// Writes the first header once more as it is, to see whether the disk takes writes.
    pub fn try_to_write(&self) -> io::Result<()> {
        let _writing = self.lock_writing();
        self.preallocate()?;
        let mut header = vec![0; self.shape.header_bytes()];
        self.file.read_at(&mut header, 0)?;
        self.file.write_at(&header, 0)?;
        self.file.sync()
    }

    fn at(&self, slot: u32) -> u64 {
        u64::from(slot) * self.shape.slot_bytes() as u64
    }

    fn index(&self) -> MutexGuard<'_, BlockIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
