//! Pinning: prefixes that stay in the cache for good.

use core::fmt;

use alloc::vec::Vec;

use crate::cache::prefix_tree::KnownPath;
use crate::{BlockId, Namespace, Scheduler, TokenId};

/// Why a prefix was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// Only `num_cached` of the prefix's full pages are computed and in the cache. Run the prefix
    /// as a prompt first.
    NotCached { num_cached: usize, num_pages: usize },
    /// Together with the pages that are already pinned it would exceed `max_pinned_pages`.
    TooMany {
        num_pages: usize,
        num_pinned: usize,
        limit: u32,
    },
}

impl Scheduler {
    /// Keeps the whole blocks of `tokens` in the prefix cache for good, even through
    /// [`reset_prefix_cache`](Self::reset_prefix_cache): all of them or none. In groups with windows, only the
    /// pages stay that a query behind those tokens reads. Returns the number of pages that were not pinned
    /// before.
    ///
    /// A page loses its pin if its contents turn out to be undefined: it was pinned while the
    /// request that computed it was running, and the request then ended because its logits were not
    /// numbers.
    pub fn pin_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
    ) -> Result<usize, PinError> {
        let num_pages = tokens.len() / self.config.page_size as usize;
        let known = &mut KnownPath::default();
        let step = self.inflight.next_step();
        let found = self.kv.find_prefix(namespace, tokens, step, known);
        let last_returned = self.last_returned();
        let is_ready = |block: &&BlockId| self.kv.block_filled_by(**block) <= last_returned;
        let num_ready = found.path.iter().take_while(is_ready).count();
        if num_ready < num_pages {
            return Err(PinError::NotCached {
                num_cached: num_ready,
                num_pages,
            });
        }
        let pages = found.tables.pages();
        let pages: Vec<_> = pages.filter(|&page| !self.kv.is_pinned(page)).collect();
        let num_pinned = self.kv.num_pinned();
        let limit = self.config.max_pinned_pages;
        if num_pinned + pages.len() > limit as usize {
            return Err(PinError::TooMany {
                num_pages: pages.len(),
                num_pinned,
                limit,
            });
        }
        for &page in &pages {
            self.kv.pin(page);
        }
        Ok(pages.len())
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
