//! The model of retention: the end of each retained page.

use super::*;
use crate::BlockId;
use crate::cache::kv_cache::retention::RetentionLimit;

const MAX_RETAINED: usize = 3;

#[derive(Default)]
pub(super) struct RetainedPages {
    now_us: u64,
    ends_us: BTreeMap<PageId, u64>,
}

impl RetainedPages {
    /// The end of a page's retention; 0 if it is not retained.
    pub fn end_us(&self, page: PageId) -> u64 {
        self.ends_us.get(&page).copied().unwrap_or(0)
    }

    /// Forgets pages that are pinned or have left the cache.
    pub fn forget(&mut self, is_kept: impl Fn(PageId) -> bool) {
        self.ends_us.retain(|&page, _| is_kept(page));
    }

    pub fn len(&self) -> usize {
        self.ends_us.len()
    }
}

impl Pair {
    /// Retains the pages that a table has published, or some of them.
    pub(super) fn retain(&mut self, at: usize) {
        let num_pages = self.tables[at].num_published as u64 + 1;
        let num_pages = below(&mut self.random, num_pages) as usize;
        let end_us = self.retained.now_us + 1 + below(&mut self.random, 300);
        let pages = &self.tables[at].pages[..num_pages];
        let block_of = |page: &PageId| self.cache.block_of(*page).expect("it is published");
        let blocks: Vec<BlockId> = pages.iter().map(block_of).collect();
        let limit = RetentionLimit {
            num_pages: MAX_RETAINED,
            num_snapshots: 0,
        };
        let ends_us = &mut self.retained.ends_us;
        let mut new = Vec::new();
        for &page in pages.iter().filter(|page| !self.pinned.contains(page)) {
            match ends_us.get_mut(&page) {
                Some(its) => *its = end_us.max(*its),
                None => new.push(page),
            }
        }
        let excess = (ends_us.len() + new.len() + self.pinned.len()).saturating_sub(MAX_RETAINED);
        let mut earlier: Vec<u64> = ends_us.values().copied().collect();
        earlier.retain(|&its| its < end_us);
        earlier.sort_unstable();
        let fits = new.is_empty() || excess <= earlier.len();
        if fits && !new.is_empty() && excess > 0 {
            let last = earlier[excess - 1];
            ends_us.retain(|_, its| *its > last);
            self.totals.num_displaced += 1;
        }
        if fits {
            ends_us.extend(new.into_iter().map(|page| (page, end_us)));
        }
        self.totals.num_not_retained += u64::from(!fits);
        assert_eq!(self.cache.retain(&blocks, end_us, limit), fits);
    }

    /// Time passes, and retentions end.
    pub(super) fn pass_time(&mut self) {
        self.retained.now_us += below(&mut self.random, 20);
        let now_us = self.retained.now_us;
        let num_before = self.retained.len();
        self.retained.ends_us.retain(|_, end_us| *end_us > now_us);
        self.totals.num_retained_ended += (num_before - self.retained.len()) as u64;
        self.cache.end_retentions(now_us);
    }

    pub(super) fn compare_retention(&self) {
        assert_eq!(self.cache.num_retained(), self.retained.len());
        for (&page, &end_us) in &self.retained.ends_us {
            assert_eq!(self.cache.retained_until_us(page), end_us, "page {page}");
        }
        let first = self.retained.ends_us.values().min().copied();
        assert_eq!(self.cache.next_retention_end_us(), first);
    }
}
