//! Keeps account of pinned prefixes, and checks that they stay in the cache.

use std::collections::BTreeSet;

use corella_core::{Namespace, PinError, Scheduler, TokenId};

use crate::checker::{Verdict, ensure};
use crate::load::Pin;

/// All pages that were pinned in a run, each with the tokens up to its end.
#[derive(Default)]
pub struct KeptPrefixes {
    pages: BTreeSet<(Namespace, Vec<TokenId>)>,
}

impl KeptPrefixes {
    /// Tries to pin a prefix and checks the outcome. Returns true if that pinned any pages.
    pub fn pin(&mut self, scheduler: &mut Scheduler, pin: &Pin) -> Result<bool, String> {
        let (page_size, limit) = {
            let config = scheduler.config();
            (config.page_size as usize, config.max_pinned_pages)
        };
        let num_whole = pin.tokens.len() / page_size;
        let num_before = scheduler.stats().num_pinned_pages;
        let result = scheduler.pin_prefix(&pin.namespace, &pin.tokens);
        let num_new = scheduler.stats().num_pinned_pages - num_before;
        let is_right = match result {
            Ok(num_pages) => num_pages == num_new && num_new <= num_whole,
            Err(PinError::NotCached {
                num_cached,
                num_pages,
            }) => num_new == 0 && num_cached < num_whole && num_pages == num_whole,
            Err(PinError::TooMany {
                num_pages,
                num_pinned,
                ..
            }) => {
                let is_over = num_pinned + num_pages > limit as usize;
                num_new == 0 && num_pinned == num_before && num_pages <= num_whole && is_over
            }
        };
        ensure(is_right, || {
            format!("pinning {num_whole} pages returned {result:?}, and {num_new} are new")
        })?;
        if result.is_ok() {
            let prefixes = (1..=num_whole).map(|num| pin.tokens[..num * page_size].to_vec());
            let pages = prefixes.map(|prefix| (pin.namespace.clone(), prefix));
            self.pages.extend(pages);
        }
        Ok(result.is_ok() && num_new > 0)
    }

    /// Checks, at the end of a run, that every pinned page holds a prefix that was pinned, and that
    /// none is lost unless `may_be_lost`. It asks by pinning again, which changes the scheduler, so
    /// it comes last.
    pub fn check(&self, scheduler: &mut Scheduler, may_be_lost: bool) -> Verdict {
        let num_pinned = scheduler.stats().num_pinned_pages;
        // Prefixes are sorted, so each comes before those that continue it.
        let is_kept = |(namespace, tokens): &&(Namespace, Vec<TokenId>)| {
            scheduler.pin_prefix(namespace, tokens) == Ok(0)
        };
        let num_kept = self.pages.iter().filter(is_kept).count();
        let num_ever = self.pages.len();
        let is_right = num_kept == num_pinned && (may_be_lost || num_kept == num_ever);
        ensure(is_right, || {
            format!("{num_kept} of {num_ever} pages are kept, and {num_pinned} are pinned")
        })
    }
}
