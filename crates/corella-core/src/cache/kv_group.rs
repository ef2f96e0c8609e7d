//! KV groups: sets of layers that have page tables of their own.

use alloc::format;

use crate::request_state::RequestState;
use crate::{ConfigError, KvCache, SchedulerConfig};

/// A set of layers that share page tables, because all of them read the same positions. Which layers
/// those are is the executor's business. All groups take their pages from one pool; a page belongs
/// to one group while it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvGroup {
    /// A query at position `p` reads positions `p - window + 1 ..= p`. Without a window it reads
    /// all positions up to its own.
    pub window: Option<u32>,
}

/// The most groups that a model may have.
pub const MAX_KV_GROUPS: usize = 8;

impl KvGroup {
    /// The first position that queries at `position` and after it read.
    pub fn first_row_read(&self, position: u32) -> u32 {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The first page that queries at `position` and after it read.
    pub fn first_page_read(&self, position: u32, page_size: u32) -> u32 {
        self.first_row_read(position) / page_size
    }

    /// The most pages that a request needs at once when it has `num_rows` rows in the end and at
    /// most `num_rows_at_once` of them are being computed.
    pub fn num_pages(&self, num_rows: u32, num_rows_at_once: u32, page_size: u32) -> u32 {
        let num_pages = num_rows.div_ceil(page_size);
        match self.window {
            None => num_pages,
            Some(window) => {
                let num_rows_read = (window - 1).saturating_add(num_rows_at_once.max(1));
                // Where a page ends before the second of those rows, they touch one page more.
                let num_touched = (num_rows_read - 1).div_ceil(page_size).saturating_add(1);
                num_pages.min(num_touched)
            }
        }
    }
}

impl SchedulerConfig {
    pub fn has_windows(&self) -> bool {
        self.kv_groups.iter().any(|group| group.window.is_some())
    }

    /// The pages that requests can have, however many are pinned.
    pub(crate) fn num_unpinned_pages(&self) -> u32 {
        self.num_pages - self.max_pinned_pages
    }

    pub(crate) fn num_kv_groups(&self) -> u32 {
        self.kv_groups.len() as u32
    }

    /// The most pages of all groups that a request needs at once.
    pub fn num_pages_of(&self, num_rows: u32, num_rows_at_once: u32) -> u32 {
        let num_pages =
            |group: &KvGroup| group.num_pages(num_rows, num_rows_at_once, self.page_size);
        self.kv_groups.iter().map(num_pages).sum()
    }

    /// The pages that hold all rows of a request, in the groups without a window.
    pub(crate) fn num_full_pages(&self, num_rows: u32) -> u32 {
        self.num_groups_without_window() * num_rows.div_ceil(self.page_size)
    }

    pub(crate) fn num_groups_without_window(&self) -> u32 {
        let groups = self.kv_groups.iter();
        groups.filter(|group| group.window.is_none()).count() as u32
    }

    /// Pages that a request needs at least, to have `num_rows` rows in the end.
    pub fn num_least_pages(&self, num_rows: u32) -> u32 {
        self.num_pages_of(num_rows, self.least_rows_at_once(num_rows))
    }

    /// Without chunked prefill, a request that was preempted computes all its rows in one step.
    fn least_rows_at_once(&self, num_rows: u32) -> u32 {
        if self.enable_chunked_prefill {
            1
        } else {
            num_rows
        }
    }

    /// The most rows that a request without any may have in flight while it prefills
    /// `num_known_tokens` tokens, so that its pages fit into the pool.
    pub(crate) fn num_rows_at_once(&self, num_known_tokens: u32) -> u32 {
        if !self.has_windows() || !self.enable_chunked_prefill {
            return u32::MAX;
        }
        let num_step_rows = self.max_prefill_tokens.min(self.max_num_batched_tokens);
        let most = num_step_rows.saturating_mul(self.max_inflight_steps);
        let num_pages = self.num_unpinned_pages();
        let fits = |num_rows| self.num_pages_of(num_known_tokens, num_rows) <= num_pages;
        largest(1, most, fits)
    }

    /// How long a request's table of a group is when it starts: as long as its known tokens or, with a
    /// window, as the rows that one step may compute.
    pub(crate) fn first_table_len(
        &self,
        state: &RequestState,
        num_ready_rows: u32,
        group: usize,
    ) -> usize {
        let num_known_tokens = state.num_known_tokens();
        let num_rows = match self.kv_groups[group].window {
            Some(_) if self.enable_chunked_prefill => {
                let num_step_rows = self.max_prefill_tokens.min(self.max_num_batched_tokens);
                let num_step_rows = num_step_rows.min(state.num_rows_at_once);
                num_known_tokens.min(num_ready_rows.saturating_add(num_step_rows))
            }
            _ => num_known_tokens,
        };
        num_rows.div_ceil(self.page_size) as usize
    }

    /// The most tokens that a request may have in the end, so that its pages fit into `num_pages`.
    pub fn max_len_in(&self, num_pages: u32) -> u32 {
        if !self.has_windows() {
            return (num_pages / self.num_kv_groups()).saturating_mul(self.page_size);
        }
        largest(0, self.max_model_len, |len| {
            self.num_least_pages(len) <= num_pages
        })
    }

    pub(crate) fn new_kv_cache(&self) -> KvCache {
        KvCache::new(self.num_pages, self.page_size, &self.kv_groups)
    }

    pub(crate) fn validate_kv_groups(&self) -> Result<(), ConfigError> {
        let num_groups = self.kv_groups.len();
        if num_groups == 0 || num_groups > MAX_KV_GROUPS {
            return Err(ConfigError(format!(
                "there are {num_groups} KV groups; a model has 1 to {MAX_KV_GROUPS}"
            )));
        }
        if self.kv_groups.iter().any(|group| group.window == Some(0)) {
            return Err(ConfigError(
                "the window of a KV group must be at least 1".into(),
            ));
        }
        // Nodes exchange the pages of one table from its first row on.
        if self.kv_groups == [KvGroup::default()] {
            return Ok(());
        }
        let value = self.max_held_pages;
        if value > 0 {
            return Err(ConfigError(format!(
                "max_held_pages is {value}, and KV of several groups or with a window cannot be sent \
                 to other nodes yet; use 0"
            )));
        }
        Ok(())
    }
}

/// The largest of `least..=most` for which `holds`, which holds up to some number and not beyond, or
/// `least`.
fn largest(least: u32, most: u32, holds: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (least, most.max(least));
    while low < high {
        let middle = high - (high - low) / 2;
        match holds(middle) {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the pages that a window touches at every alignment.
    #[test]
    fn a_window_needs_the_pages_that_it_touches_at_worst() {
        for (window, num_rows_at_once, page_size) in (1..20)
            .flat_map(|window| (1..9).map(move |at_once| (window, at_once)))
            .flat_map(|(window, at_once)| (1..7).map(move |size| (window, at_once, size)))
        {
            let group = KvGroup {
                window: Some(window),
            };
            let touched = (0..100).map(|start: u32| {
                let first = group.first_page_read(start, page_size);
                let read = (0..=start).find(|&row| row + window > start);
                assert_eq!(read.map(|row| row / page_size), Some(first));
                (start + num_rows_at_once).div_ceil(page_size) - first
            });
            assert_eq!(
                touched.max(),
                Some(group.num_pages(10_000, num_rows_at_once, page_size)),
                "window {window}, {num_rows_at_once} rows, pages of {page_size}"
            );
        }
    }
}
