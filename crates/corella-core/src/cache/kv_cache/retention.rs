//! Retention: prefixes that requests have marked, whose pages are evicted after all other cached pages until a time.
//!
//! A retained page has no lock: running requests come first, and take even retained pages when no other cached page is
//! left. So retained pages never make a request wait, and never shorten the longest possible request. Their number is
//! limited. When the limit is reached, a prefix takes the room of those that end before it, the earliest first, or is
//! not retained.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::{BlockId, PageId};

/// The retained pages, and the times at which their retention ends.
#[derive(Debug, Default)]
pub(super) struct Retained {
    /// By page; 0 if the page is not retained. Empty until the first retention.
    ends_us: Vec<u64>,
    /// All retained pages.
    in_order: BTreeSet<(u64, PageId)>,
    /// The retained pages that can be evicted.
    evictable: BTreeSet<(u64, PageId)>,
    num_evicted: u64,
}

impl Retained {
    pub fn len(&self) -> usize {
        self.in_order.len()
    }

    /// The number of pages that requests took before the end of their retention.
    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    /// The time at which a page's retention ends; 0 if the page is not retained.
    pub fn end_us(&self, page: PageId) -> u64 {
        self.ends_us.get(page.0 as usize).copied().unwrap_or(0)
    }

    pub fn has(&self, page: PageId) -> bool {
        self.end_us(page) > 0
    }

    pub fn next_end_us(&self) -> Option<u64> {
        self.in_order.first().map(|&(end_us, _)| end_us)
    }

    /// Retains a page until `end_us`, or no longer if `end_us` is 0. The page is not among the evictable ones.
    fn set(&mut self, page: PageId, end_us: u64) {
        let at = page.0 as usize;
        if self.ends_us.len() <= at {
            self.ends_us.resize(at + 1, 0);
        }
        let before = core::mem::replace(&mut self.ends_us[at], end_us);
        if before > 0 {
            self.in_order.remove(&(before, page));
        }
        if end_us > 0 {
            self.in_order.insert((end_us, page));
        }
    }

    /// Whether the retention of at least `num_pages` pages ends before `end_us`.
    fn has_earlier(&self, end_us: u64, num_pages: usize) -> bool {
        let earlier = self.in_order.range(..(end_us, PageId(0)));
        earlier.take(num_pages).count() == num_pages
    }

    /// Lists a retained page for eviction. Returns false if the page is not retained.
    pub fn list(&mut self, page: PageId) -> bool {
        let end_us = self.end_us(page);
        if end_us > 0 {
            self.evictable.insert((end_us, page));
        }
        end_us > 0
    }

    /// Removes a retained page from the eviction list, if present. Returns false if the page is not retained.
    pub fn unlist(&mut self, page: PageId) -> bool {
        let end_us = self.end_us(page);
        if end_us > 0 {
            self.evictable.remove(&(end_us, page));
        }
        end_us > 0
    }

    pub fn is_listed(&self, page: PageId) -> bool {
        self.evictable.contains(&(self.end_us(page), page))
    }

    /// The pages that can be evicted, in the order of their eviction.
    pub fn listed(&self) -> impl Iterator<Item = &(u64, PageId)> {
        self.evictable.iter()
    }

    pub fn num_listed(&self) -> usize {
        self.evictable.len()
    }

    /// The page to evict next: the one whose retention ends first.
    pub fn next_evictable(&self) -> Option<PageId> {
        self.evictable.first().map(|&(_, page)| page)
    }

    /// Counts an eviction for a request if the page is a retained one.
    pub fn note_evicted(&mut self, is_retained: bool) {
        self.num_evicted += u64::from(is_retained);
    }

    /// # Panics
    /// Panics when the lists and the times by page differ.
    fn check_invariants(&self) {
        for &(end_us, page) in self.in_order.iter().chain(&self.evictable) {
            assert_eq!(
                end_us,
                self.end_us(page),
                "page {page} is retained until another time"
            );
        }
        let ends_us = self.ends_us.iter();
        let num_retained = ends_us.filter(|&&end_us| end_us > 0).count();
        assert_eq!(
            num_retained,
            self.in_order.len(),
            "a page is retained and its end is not listed"
        );
    }
}

/// The most pages, and the most snapshots, that may be pinned or retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetentionLimit {
    pub num_pages: usize,
    pub num_snapshots: usize,
}

impl KvCache {
    /// Retains the pages that a query after `path` reads, and the snapshot at its end, until `end_us` or, if they are
    /// retained longer, until then. Returns false if the limit leaves no room for pages that were not retained before.
    pub(crate) fn retain(&mut self, path: &[BlockId], end_us: u64, limit: RetentionLimit) -> bool {
        let Some(&last) = path.last() else {
            return true;
        };
        let tables = self.tables_of(path);
        let pages = tables.pages().filter(|&page| !self.is_pinned(page));
        let (before, new): (Vec<_>, Vec<_>) = pages.partition(|&page| self.retained.has(page));
        for page in before {
            if self.retained.end_us(page) < end_us {
                self.set_retention(page, end_us);
            }
        }
        let Some(num_missing) = self.num_to_end(new.len(), end_us, limit.num_pages) else {
            return false;
        };
        if !self.retain_snapshot(last, end_us, limit.num_snapshots) {
            return false;
        }
        self.end_earliest_retentions(num_missing);
        for page in new {
            self.set_retention(page, end_us);
        }
        // Its rows are worth a copy in a lower tier.
        self.note_reused(last);
        true
    }

    /// The number of retentions to end before `num_pages` more pages may be retained until `end_us`. `None` if too few
    /// end by then.
    fn num_to_end(&self, num_pages: usize, end_us: u64, limit: usize) -> Option<usize> {
        if num_pages == 0 {
            return Some(0);
        }
        let num_kept = self.num_pinned() + self.retained.len();
        let num_missing = (num_kept + num_pages).saturating_sub(limit);
        let has_earlier = self.retained.has_earlier(end_us, num_missing);
        has_earlier.then_some(num_missing)
    }

    fn end_earliest_retentions(&mut self, num_pages: usize) {
        let num_left = self.retained.len() - num_pages;
        while self.retained.len() > num_left {
            let Some(earliest_us) = self.retained.next_end_us() else {
                break;
            };
            // Pages of one prefix mostly end together. A part of a prefix would be of no use.
            self.end_page_retentions(earliest_us);
        }
    }

    /// Ends all retentions whose time has come.
    pub(crate) fn end_retentions(&mut self, now_us: u64) {
        self.end_page_retentions(now_us);
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.end_retentions(now_us);
        }
    }

    fn end_page_retentions(&mut self, now_us: u64) {
        while let Some(&(end_us, page)) = self.retained.in_order.first()
            && end_us <= now_us
        {
            self.set_retention(page, 0);
        }
    }

    /// The next time at which [`end_retentions`](Self::end_retentions) has work.
    pub(crate) fn next_retention_end_us(&self) -> Option<u64> {
        let snapshots = self.residency.snapshots();
        let of_snapshots = snapshots.and_then(|snapshots| snapshots.next_retention_end_us());
        let of_pages = self.retained.next_end_us();
        of_pages.into_iter().chain(of_snapshots).min()
    }

    /// Retains a page of the tree until `end_us`, or no longer if `end_us` is 0.
    pub(super) fn set_retention(&mut self, page: PageId, end_us: u64) {
        debug_assert!(self.residency.is_resident(page));
        let is_locked = self.is_locked(page);
        if !is_locked {
            self.unlist(page);
        }
        self.retained.set(page, end_us);
        if !is_locked {
            self.note_leaf(page);
        }
    }

    /// Forgets the retention of a page that leaves the tree and is not listed for eviction.
    pub(super) fn forget_retention(&mut self, page: PageId) {
        if self.retained.has(page) {
            self.retained.set(page, 0);
        }
    }

    pub fn num_retained(&self) -> usize {
        self.retained.len()
    }

    #[cfg(test)]
    pub(crate) fn retained_until_us(&self, page: PageId) -> u64 {
        self.retained.end_us(page)
    }

    /// The number of pages that requests took before the end of their retention.
    pub fn num_retained_evicted(&self) -> u64 {
        self.retained.num_evicted()
    }

    /// # Panics
    /// Panics when a page is retained that is pinned or not in the tree or, in a group without a window, longer than
    /// the page before it.
    pub(super) fn check_retention(&self) {
        self.retained.check_invariants();
        for &(end_us, page) in &self.retained.in_order {
            let resident = self.residency.resident(page);
            let resident = resident.unwrap_or_else(|| {
                panic!("page {page} is retained, but not in the tree");
            });
            assert!(!self.is_pinned(page), "page {page} is retained and pinned");
            if self.residency.has_window(resident) {
                continue;
            }
            let before = self.tree.block_before(resident.block);
            let before = before.and_then(|before| self.residency.page(before, resident.group()));
            assert!(
                before.is_none_or(|it| self.is_pinned(it) || self.retained.end_us(it) >= end_us),
                "page {page} is retained longer than the page before it"
            );
        }
    }
}
