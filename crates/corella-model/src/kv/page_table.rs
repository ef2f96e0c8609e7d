//! The page table of a sequence in one KV group, for a step.

use corella_core::PageId;

/// The pages of a sequence in one KV group, from the first one that the step reads or writes. In a group with a window,
/// earlier pages may already belong to other sequences, and are not listed.
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

    /// The index of the first listed entry.
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
