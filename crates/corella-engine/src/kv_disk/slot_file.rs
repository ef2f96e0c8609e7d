//! The file of a disk: a label, and a range of the store's slots.
//!
//! The file grows in steps when pages need more slots. Disk space is reserved for each step before slots are used.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::file_layer::FileLayer;
use super::label::LABEL_BYTES;
use super::slot::{Header, PageName, SlotShape};

pub(super) struct SlotFile<F> {
    /// Unset until the file could be opened.
    file: OnceLock<F>,
    shape: SlotShape,
    label: Vec<u8>,
    /// The slots for which the configured size has room.
    slots: Range<u32>,
    /// The number of slots, from the first on, whose disk space is reserved.
    num_reserved: AtomicU32,
    /// Whether the file could not grow as far as it needed.
    is_short: AtomicBool,
}

/// The number of steps in which a file grows to its size.
const NUM_STEPS: u32 = 8;

impl<F: FileLayer> SlotFile<F> {
    /// A file of at most `max_bytes` bytes, whose first slot has the number `first`.
    pub fn new(first: u32, shape: SlotShape, label: Vec<u8>, max_bytes: u64) -> Self {
        let slots_bytes = max_bytes.saturating_sub(LABEL_BYTES as u64);
        let num_slots = slots_bytes / shape.slot_bytes() as u64;
        let num_slots = num_slots.min(u64::from(u32::MAX - first)) as u32;
        Self {
            file: OnceLock::new(),
            shape,
            label,
            slots: first..first + num_slots,
            num_reserved: AtomicU32::new(0),
            is_short: AtomicBool::new(false),
        }
    }

    pub fn slots(&self) -> Range<u32> {
        self.slots.clone()
    }

    /// The slots whose disk space is reserved.
    pub fn reserved(&self) -> Range<u32> {
        self.slots.start..self.slots.start + self.num_reserved.load(Ordering::Relaxed)
    }

    /// The number of pages for which there is room, as far as is known.
    pub fn max_pages(&self) -> u32 {
        match self.is_short.load(Ordering::Relaxed) {
            true => self.reserved().len() as u32,
            false => self.slots.len() as u32,
        }
    }

    /// The number of slots by which the file grows.
    pub fn step(&self) -> u32 {
        (self.slots.len() as u32).div_ceil(NUM_STEPS)
    }

    pub fn is_set(&self) -> bool {
        self.file.get().is_some()
    }

    /// Begins to use a file, which [`prepare`](Self::prepare) has made ready.
    pub fn set(&self, file: F) {
        let _ = self.file.set(file);
    }

    fn file(&self) -> io::Result<&F> {
        let file = self.file.get();
        file.ok_or_else(|| io::Error::other("the file is not open yet"))
    }

    /// Reserves disk space for the first slots, unless the file has some, and labels the file.
    pub fn prepare(&self, file: &F) -> io::Result<()> {
        self.reserve_in(file, self.step())?;
        let mut label = vec![0; LABEL_BYTES];
        let is_there = file.read_at(&mut label, 0).is_ok() && label == self.label;
        match is_there || self.reserved().is_empty() {
            true => Ok(()),
            false => self.write_label_to(file),
        }
    }

    fn write_label_to(&self, file: &F) -> io::Result<()> {
        file.write_at(&self.label, 0)?;
        file.sync()
    }

    pub fn write_label(&self) -> io::Result<()> {
        self.write_label_to(self.file()?)
    }

    /// Reserves the disk space of the first `num_slots` slots, or of fewer slots if the disk has no more room.
    fn reserve_in(&self, file: &F, num_slots: u32) -> io::Result<()> {
        let len = file.reserve(self.at(self.slots.start + num_slots))?;
        let slots_bytes = len.saturating_sub(LABEL_BYTES as u64);
        let num_there = slots_bytes / self.shape.slot_bytes() as u64;
        let num_there = num_there.min(self.slots.len() as u64) as u32;
        self.is_short
            .store(num_there < num_slots, Ordering::Relaxed);
        self.num_reserved.store(num_there, Ordering::Relaxed);
        Ok(())
    }

    /// Reserves the disk space of further slots. Returns these slots; none if there is no more room.
    pub fn grow(&self) -> io::Result<Range<u32>> {
        let before = self.reserved();
        if before.len() < self.slots.len() {
            let num_slots = before.len() as u32 + self.step();
            self.reserve_in(self.file()?, num_slots.min(self.slots.len() as u32))?;
        }
        Ok(before.end..self.reserved().end.max(before.end))
    }

    /// Fills `bytes`, from the slot's beginning on. Returns false if the file was cut off.
    pub fn read(&self, slot: u32, bytes: &mut [u8]) -> io::Result<bool> {
        match self.file()?.read_at(bytes, self.at(slot)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins to bring a slot to memory.
    pub fn read_ahead(&self, slot: u32) {
        if let Some(file) = self.file.get() {
            file.read_ahead(self.at(slot), self.shape.slot_bytes() as u64);
        }
    }

    /// Writes pages, each with its slot and its rows. After a crash meanwhile, each of them is right or absent.
    pub fn write(&self, writes: &[(u32, &PageName, &[u8])], time: u64) -> io::Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let file = self.file()?;
        let header_bytes = self.shape.header_bytes() as u64;
        for &(slot, _, rows) in writes {
            file.write_at(rows, self.at(slot) + header_bytes)?;
        }
        file.sync()?;
        for &(slot, page, rows) in writes {
            let header = self.shape.header(page, time, rows);
            file.write_at(&header, self.at(slot))?;
        }
        file.sync()
    }

    /// Overwrites the slots whose headers `is_of` chooses. Calls `note` with each of them.
    pub fn wipe(
        &self,
        is_of: impl Fn(&Header) -> bool,
        mut note: impl FnMut(u32, Header),
    ) -> io::Result<()> {
        let file = self.file()?;
        let mut header = vec![0; self.shape.header_bytes()];
        let empty = vec![0; self.shape.slot_bytes()];
        for slot in self.reserved() {
            file.read_at(&mut header, self.at(slot))?;
            let found = self.shape.read_header(&header);
            if let Some(found) = found.filter(&is_of) {
                note(slot, found);
                file.write_at(&empty, self.at(slot))?;
            }
        }
        file.sync()
    }

    /// Empties the file, except for its label, and reserves its first slots again.
    pub fn erase(&self) -> io::Result<()> {
        let file = self.file()?;
        self.num_reserved.store(0, Ordering::Relaxed);
        file.clear()?;
        self.reserve_in(file, self.step())?;
        self.write_label_to(file)
    }

    fn at(&self, slot: u32) -> u64 {
        LABEL_BYTES as u64 + u64::from(slot - self.slots.start) * self.shape.slot_bytes() as u64
    }

    #[cfg(test)]
    pub fn test_file(&self) -> &F {
        self.file.get().expect("the test has set it")
    }

    #[cfg(test)]
    pub fn offset(&self, slot: u32) -> u64 {
        self.at(slot)
    }
}
