//! The page pool: the free pages, and the locks of the others.

use alloc::vec::Vec;

use crate::PageId;

/// A page is free, locked by the tables that name it, or kept by the prefix tree alone. The pool itself knows only
/// whether a page is free, and its number of locks.
#[derive(Debug)]
pub(crate) struct PagePool {
    free: Vec<PageId>,
    locks: Vec<u32>,
}

impl PagePool {
    pub fn new(num_pages: u32) -> Self {
        Self {
            // Pages are taken from the end, so low numbers come first.
            free: (0..num_pages).rev().map(PageId).collect(),
            locks: alloc::vec![0; num_pages as usize],
        }
    }

    pub fn num_pages(&self) -> usize {
        self.locks.len()
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn num_locks(&self, page: PageId) -> u32 {
        self.locks[page.0 as usize]
    }

    /// Takes a free page and locks it once.
    pub fn try_take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.locks[page.0 as usize] = 1;
        Some(page)
    }

    /// Adds a lock and returns the number of locks.
    pub fn lock(&mut self, page: PageId) -> u32 {
        let locks = &mut self.locks[page.0 as usize];
        *locks += 1;
        *locks
    }

    /// Removes a lock and returns the number of locks left.
    pub fn unlock(&mut self, page: PageId) -> u32 {
        let locks = &mut self.locks[page.0 as usize];
        assert!(*locks > 0, "page {page} is unlocked more often than locked");
        *locks -= 1;
        *locks
    }

    pub fn free(&mut self, page: PageId) {
        assert_eq!(self.num_locks(page), 0, "page {page} is freed while locked");
        self.free.push(page);
    }

    pub fn free_pages(&self) -> &[PageId] {
        &self.free
    }
}
