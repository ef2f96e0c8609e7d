//! The page table of a sequence in one KV group, as a step reads it.

use corella_core::PageId;

/// The pages of a sequence in one KV group, from the first on that the step reads or writes. In a
/// group with a window, those before it may be other sequences' by now, and are not listed.
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'a> {
    first: usize,
    pages: &'a [PageId],
}

impl<'a> PageTable<'a> {
    /// `pages` are the entries from `first` on.
    pub fn new(first: usize, pages: &'a [PageId]) -> Self {
        Self { first, pages }
    }

    /// The number of the first entry that is listed.
    pub fn first(&self) -> usize {
        self.first
    }

    pub fn pages(&self) -> &'a [PageId] {
        self.pages
    }

    /// The page of an entry.
    pub fn page(&self, entry: usize) -> usize {
        self.pages[entry - self.first].0 as usize
    }
}
