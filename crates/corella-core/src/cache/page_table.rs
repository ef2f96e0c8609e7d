//! The page tables of a request: one for each KV group.

use alloc::vec::{Drain, Vec};

use crate::PageId;

/// The pages of one group, in order of their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// The number of missing entries at the beginning. They are outside the group's window or belong to an earlier
    /// part.
    pub num_gone: usize,
    /// The entries after the missing ones.
    pub pages: Vec<PageId>,
}

impl PageTable {
    /// A table without missing entries.
    pub fn whole(pages: Vec<PageId>) -> Self {
        let num_gone = 0;
        Self { num_gone, pages }
    }

    /// The number of entries, including the missing ones.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.num_gone + self.pages.len()
    }

    /// Removes the pages before entry `first`, which are missing from then on.
    pub(crate) fn take_before(&mut self, first: usize) -> Drain<'_, PageId> {
        let num_pages = first.saturating_sub(self.num_gone);
        self.num_gone += num_pages;
        self.pages.drain(..num_pages.min(self.pages.len()))
    }

    pub fn page(&self, at: usize) -> Option<PageId> {
        self.pages.get(at.checked_sub(self.num_gone)?).copied()
    }

    /// A copy of the entries `first..end`, without the missing ones.
    pub(crate) fn part(&self, first: usize, end: usize) -> Self {
        let first = first.max(self.num_gone);
        let pages = (first..end).map_while(|at| self.page(at)).collect();
        let num_gone = first;
        Self { num_gone, pages }
    }

    /// Appends a later part of the same table, which may overlap this one. Returns the new entries.
    pub fn append(&mut self, part: &Self) -> Self {
        if self.pages.is_empty() {
            self.num_gone = part.num_gone;
        }
        let num_known = self
            .len()
            .saturating_sub(part.num_gone)
            .min(part.pages.len());
        let (known, new) = part.pages.split_at(num_known);
        debug_assert!(
            self.pages.ends_with(known),
            "a page of the table has changed"
        );
        self.pages.extend(new);
        Self {
            num_gone: part.num_gone + num_known,
            pages: new.to_vec(),
        }
    }
}

/// The table of the first group stands apart, so that a model with one group needs no list of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageTables {
    first: PageTable,
    others: Vec<PageTable>,
}

impl PageTables {
    pub fn new(num_groups: usize) -> Self {
        Self {
            first: PageTable::default(),
            others: alloc::vec![PageTable::default(); num_groups - 1],
        }
    }

    /// The table of a group, by the group's index.
    pub fn group(&self, group: usize) -> &PageTable {
        match group {
            0 => &self.first,
            _ => &self.others[group - 1],
        }
    }

    pub fn to_vec(&self) -> Vec<PageTable> {
        self.iter().cloned().collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &PageTable> {
        core::iter::once(&self.first).chain(&self.others)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut PageTable> {
        core::iter::once(&mut self.first).chain(&mut self.others)
    }

    pub fn num_groups(&self) -> usize {
        1 + self.others.len()
    }

    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.iter().flat_map(|table| &table.pages).copied()
    }

    pub fn num_pages(&self) -> usize {
        let others = self.others.iter().map(|table| table.pages.len());
        self.first.pages.len() + others.sum::<usize>()
    }

    /// The number of entries of the shortest table, with the missing ones. Tables of groups with a window are shorter
    /// than the others while a prompt is being read.
    pub fn len(&self) -> usize {
        let others = self.others.iter().map(PageTable::len);
        others.fold(self.first.len(), usize::min)
    }

    pub fn is_empty(&self) -> bool {
        self.num_pages() == 0
    }

    /// Removes the entries before `end` from all tables, and returns them. The later entries stay.
    pub fn split_before(&mut self, end: usize) -> Self {
        let mut before = Self::new(self.num_groups());
        for (table, taken) in self.iter_mut().zip(before.iter_mut()) {
            let rest = table.pages.split_off(end - table.num_gone);
            taken.num_gone = table.num_gone;
            taken.pages = core::mem::replace(&mut table.pages, rest);
        }
        before
    }

    /// Empties the tables and returns the pages that they named.
    pub fn take_pages(&mut self) -> Vec<PageId> {
        for table in &mut self.others {
            self.first.pages.append(&mut table.pages);
            table.num_gone = 0;
        }
        self.first.num_gone = 0;
        core::mem::take(&mut self.first.pages)
    }
}
