//! Prefixes that stay in the cache for good.

use core::fmt;

use crate::{Namespace, Scheduler, TokenId};

/// Why nothing was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// Only so many of the whole pages are in the cache and computed. Run the prefix as a
    /// prompt first.
    NotCached { num_cached: usize, num_pages: usize },
    /// With what is pinned already it would be more than `max_pinned_pages`.
    TooMany {
        num_pages: usize,
        num_pinned: usize,
        limit: u32,
    },
}

impl Scheduler {
    /// Keeps the whole pages of `tokens` in the prefix cache until the scheduler ends, also
    /// through [`reset_prefix_cache`](Self::reset_prefix_cache): all of them or none. Returns how
    /// many pages that took; pages that two prefixes share are taken once.
    ///
    /// A page loses its pin when what it holds turns out to be undefined: pinned while its request
    /// was running, which then ended in logits that are no numbers.
    pub fn pin_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
    ) -> Result<usize, PinError> {
        let num_pages = tokens.len() / self.config.page_size as usize;
        let mut pages = self
            .kv
            .match_prefix(namespace, tokens, self.next_step)
            .pages;
        let last_returned = self.last_returned();
        let num_ready = pages
            .iter()
            .take_while(|&&page| self.kv.filled_by(page) <= last_returned)
            .count();
        if num_ready < num_pages {
            return Err(PinError::NotCached {
                num_cached: num_ready,
                num_pages,
            });
        }
        pages.retain(|&page| !self.kv.is_pinned(page));
        let num_pinned = self.kv.num_pinned();
        let limit = self.config.max_pinned_pages;
        if num_pinned + pages.len() > limit as usize {
            return Err(PinError::TooMany {
                num_pages: pages.len(),
                num_pinned,
                limit,
            });
        }
        self.num_changes += 1;
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
            } => write!(f, "only {num_cached} of its {num_pages} pages are cached"),
            Self::TooMany {
                num_pages,
                num_pinned,
                limit,
            } => write!(
                f,
                "it takes {num_pages} KV pages; {num_pinned} are pinned already, and {limit} may be"
            ),
        }
    }
}

impl core::error::Error for PinError {}
