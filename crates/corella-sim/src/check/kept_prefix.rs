//! The pinned prefixes, and the check that they stay in the cache.

use std::collections::BTreeSet;

use corella_core::{Namespace, PinError, Scheduler, SchedulerConfig, TokenId};

use crate::check::verdict::{Verdict, ensure};
use crate::workload::Pin;

/// All prefixes that were pinned in a run. Without windows and recurrent layers, pinning a prefix also pins each
/// shorter prefix of whole blocks. With windows, queries after a shorter prefix read other pages, and with recurrent
/// layers they need another state.
#[derive(Default)]
pub struct KeptPrefixes {
    prefixes: BTreeSet<(Namespace, Vec<TokenId>)>,
}

impl KeptPrefixes {
    /// Tries to pin a prefix and checks the outcome. Returns true if that pinned any pages.
    pub fn pin(&mut self, scheduler: &mut Scheduler, pin: &Pin) -> Result<bool, String> {
        let config = scheduler.config();
        let (page_size, limit) = (config.page_size as usize, config.max_pinned_pages);
        let num_whole = pin.tokens.len() / page_size;
        let num_most = num_whole * config.kv_groups.len();
        let is_kept_alone = is_kept_alone(config);
        let first = if is_kept_alone { num_whole } else { 1 };
        let num_before = scheduler.stats().num_pinned_pages;
        let result = scheduler.pin_prefix(&pin.namespace, &pin.tokens);
        let num_new = scheduler.stats().num_pinned_pages - num_before;
        let is_right = match result {
            Ok(num_pages) => num_pages == num_new && num_new <= num_most,
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
                num_new == 0 && num_pinned == num_before && num_pages <= num_most && is_over
            }
        };
        ensure(is_right, || {
            format!("pinning {num_whole} blocks returned {result:?}, and {num_new} are new")
        })?;
        // With a window of one token, a query after a prefix reads none of the prefix's rows, so no page is pinned.
        if result.is_ok() && (num_new > 0 || !is_kept_alone) {
            let prefixes = (first..=num_whole).map(|num| pin.tokens[..num * page_size].to_vec());
            let prefixes = prefixes.map(|prefix| (pin.namespace.clone(), prefix));
            self.prefixes.extend(prefixes);
        }
        Ok(result.is_ok() && num_new > 0)
    }

    /// Checks, at the end of a run, that all pinned prefixes are cached and pinned, unless `may_be_lost`. If pinning
    /// also pins the shorter prefixes, each prefix has one more pinned page in each group, and no other page is pinned.
    /// The check pins the prefixes again, which changes the scheduler, so it comes last.
    pub fn check(&self, scheduler: &mut Scheduler, may_be_lost: bool) -> Verdict {
        let num_pinned = scheduler.stats().num_pinned_pages;
        let num_groups = scheduler.config().kv_groups.len();
        let is_kept_alone = is_kept_alone(scheduler.config());
        // Prefixes are sorted, so each prefix comes before longer prefixes that continue it.
        let is_kept = |(namespace, tokens): &&(Namespace, Vec<TokenId>)| {
            scheduler.pin_prefix(namespace, tokens) == Ok(0)
        };
        let num_kept = self.prefixes.iter().filter(is_kept).count();
        let num_ever = self.prefixes.len();
        let has_no_other = is_kept_alone || num_kept * num_groups == num_pinned;
        let is_right = has_no_other && (may_be_lost || num_kept == num_ever);
        ensure(is_right, || {
            format!("{num_kept} of {num_ever} prefixes are kept, and {num_pinned} are pinned")
        })
    }
}

/// Whether a prefix can be pinned without its shorter prefixes.
fn is_kept_alone(config: &SchedulerConfig) -> bool {
    config.has_windows() || config.recurrent_state.is_some()
}
