//! Pinning: prefixes that are never evicted.

use core::fmt;

use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::{Namespace, PageId, StepId, TokenId};

/// The reason for which a prefix was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// Only `num_cached` of the prefix's full pages are computed and in the cache. Run the prefix as a prompt first.
    NotCached { num_cached: usize, num_pages: usize },
    /// The prefix and the pages that are already pinned would exceed `max_pinned_pages`.
    TooMany {
        num_pages: usize,
        num_pinned: usize,
        limit: u32,
    },
}

impl KvCache {
    /// Pins the whole blocks of `tokens`, if steps up to `last_returned` have computed all of them and the pinned pages
    /// stay within `max_pages`. Returns the number of newly pinned pages.
    pub(crate) fn pin_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        last_returned: Option<StepId>,
        max_pages: u32,
    ) -> Result<usize, PinError> {
        let num_pages = tokens.len() / self.page_size() as usize;
        let path = self.settled_path(namespace, tokens, last_returned);
        if path.len() < num_pages {
            return Err(PinError::NotCached {
                num_cached: path.len(),
                num_pages,
            });
        }
        let tables = self.tables_of(&path);
        let pages = tables.pages();
        let pages: Vec<_> = pages.filter(|&page| !self.is_pinned(page)).collect();
        let num_pinned = self.num_pinned();
        if num_pinned + pages.len() > max_pages as usize {
            return Err(PinError::TooMany {
                num_pages: pages.len(),
                num_pinned,
                limit: max_pages,
            });
        }
        for &page in &pages {
            self.pin(page);
        }
        if let Some(&last) = path.last() {
            self.pin_snapshot(last);
        }
        Ok(pages.len())
    }

    /// Pins a page of a block. A pinned page is never evicted, and only unpublishing its block removes the pin. In a
    /// group without a window, the pages before it on its path must be pinned too.
    pub(crate) fn pin(&mut self, page: PageId) {
        debug_assert!(self.residency.is_resident(page));
        if self.pins.insert(page) {
            self.lock(page);
            self.forget_retention(page);
        }
    }
}

/// The pinned pages. A pinned page has a lock of its own while it is in the tree.
#[derive(Debug)]
pub(super) struct Pins {
    is_pinned: Vec<bool>,
    num_pinned: usize,
}

impl Pins {
    pub fn new(num_pages: u32) -> Self {
        Self {
            is_pinned: alloc::vec![false; num_pages as usize],
            num_pinned: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.num_pinned
    }

    pub fn has(&self, page: PageId) -> bool {
        self.is_pinned[page.0 as usize]
    }

    /// Returns false if the page was pinned already.
    fn insert(&mut self, page: PageId) -> bool {
        let is_new = !core::mem::replace(&mut self.is_pinned[page.0 as usize], true);
        self.num_pinned += usize::from(is_new);
        is_new
    }

    /// Returns false if the page was not pinned.
    pub fn remove(&mut self, page: PageId) -> bool {
        if self.num_pinned == 0 {
            return false;
        }
        let was_pinned = core::mem::take(&mut self.is_pinned[page.0 as usize]);
        self.num_pinned -= usize::from(was_pinned);
        was_pinned
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotCached {
                num_cached,
                num_pages,
            } => write!(
                f,
                "only {num_cached} of the prefix's {num_pages} KV pages are cached"
            ),
            Self::TooMany {
                num_pages,
                num_pinned,
                limit,
            } => write!(
                f,
                "the prefix takes {num_pages} KV pages; {num_pinned} of at most {limit} are already \
                 pinned"
            ),
        }
    }
}

impl core::error::Error for PinError {}
