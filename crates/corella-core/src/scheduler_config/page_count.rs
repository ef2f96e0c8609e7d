//! The number of pages that requests take in the KV groups of a configuration.

use alloc::format;

use crate::{ConfigError, KvGroup, MAX_KV_GROUPS, SchedulerConfig};

impl SchedulerConfig {
    pub fn has_windows(&self) -> bool {
        self.kv_groups.iter().any(|group| group.window.is_some())
    }

    /// The number of pages that always remain for requests, even if `max_pinned_pages` are pinned.
    pub(crate) fn num_unpinned_pages(&self) -> u32 {
        self.num_pages - self.max_pinned_pages
    }

    pub(crate) fn num_kv_groups(&self) -> u32 {
        self.kv_groups.len() as u32
    }

    /// The largest number of pages, in all groups, that a request needs at once.
    pub fn num_pages_of(&self, num_rows: u32, num_rows_at_once: u32) -> u32 {
        let num_pages =
            |group: &KvGroup| group.num_pages(num_rows, num_rows_at_once, self.page_size);
        self.kv_groups.iter().map(num_pages).sum()
    }

    /// The number of pages for all rows of a request, in the groups without a window.
    pub(crate) fn num_full_pages(&self, num_rows: u32) -> u32 {
        self.num_groups_without_window() * num_rows.div_ceil(self.page_size)
    }

    pub(crate) fn num_groups_without_window(&self) -> u32 {
        let groups = self.kv_groups.iter();
        groups.filter(|group| group.window.is_none()).count() as u32
    }

    /// The smallest number of pages with which a request can reach `num_rows` rows.
    pub fn num_least_pages(&self, num_rows: u32) -> u32 {
        self.num_pages_of(num_rows, self.least_rows_at_once(num_rows))
    }

    /// The number of pages that other nodes read, of a prompt of `num_rows` rows.
    pub(crate) fn num_exported_pages(&self, num_rows: u32) -> u32 {
        let num_pages = num_rows.div_ceil(self.page_size);
        let exported = |group: &KvGroup| {
            num_pages
                - group
                    .first_page_exported(num_rows, self.page_size)
                    .min(num_pages)
        };
        self.kv_groups.iter().map(exported).sum()
    }

    /// Whether the pool has room for a request of `num_final_rows` rows that exports its first `num_rows` rows. The
    /// request keeps the exported pages even after they have left the windows, because other nodes read them.
    pub(crate) fn has_room_beside_export(&self, num_rows: u32, num_final_rows: u32) -> bool {
        let num_kept = self.num_exported_pages(num_rows) - self.num_full_pages(num_rows);
        num_final_rows <= num_rows
            || self.num_least_pages(num_final_rows) + num_kept <= self.num_unpinned_pages()
    }

    /// Without chunked prefill, a preempted request computes all its rows in one step.
    fn least_rows_at_once(&self, num_rows: u32) -> u32 {
        if self.enable_chunked_prefill {
            1
        } else {
            num_rows
        }
    }

    /// The largest number of rows in flight with which a request's pages fit into the pool, if it starts without rows
    /// and prefills `num_known_tokens` tokens.
    pub(crate) fn num_rows_at_once(&self, num_known_tokens: u32) -> u32 {
        if !self.has_windows() || !self.enable_chunked_prefill {
            return u32::MAX;
        }
        let most = self.largest_chunk().saturating_mul(self.max_inflight_steps);
        let num_pages = self.num_unpinned_pages();
        let fits = |num_rows| self.num_pages_of(num_known_tokens, num_rows) <= num_pages;
        largest(1, most, fits)
    }

    /// The length of a group's table when its request starts: entries for the request's known tokens or, with a window,
    /// for the rows that one step may compute.
    pub(crate) fn first_table_len(
        &self,
        num_known_tokens: u32,
        num_rows_at_once: u32,
        num_ready_rows: u32,
        group: usize,
    ) -> usize {
        let num_rows = match self.kv_groups[group].window {
            Some(_) if self.enable_chunked_prefill => {
                let num_step_rows = self.largest_chunk().min(num_rows_at_once);
                num_known_tokens.min(num_ready_rows.saturating_add(num_step_rows))
            }
            _ => num_known_tokens,
        };
        num_rows.div_ceil(self.page_size) as usize
    }

    /// The largest length, in tokens, of a request whose pages fit into `num_pages`.
    pub fn max_len_in(&self, num_pages: u32) -> u32 {
        if !self.has_windows() {
            return (num_pages / self.num_kv_groups()).saturating_mul(self.page_size);
        }
        largest(0, self.max_model_len, |len| {
            self.num_least_pages(len) <= num_pages
        })
    }

    pub(super) fn validate_kv_groups(&self) -> Result<(), ConfigError> {
        let num_groups = self.kv_groups.len();
        if num_groups == 0 || num_groups > MAX_KV_GROUPS {
            let text = format!(" are {num_groups}; a model has 1 to {MAX_KV_GROUPS}");
            return Err(ConfigError::new("kv_groups", text));
        }
        if self.kv_groups.iter().any(|group| group.window == Some(0)) {
            return Err(ConfigError::new(
                "kv_groups",
                ": the window of each must be at least 1",
            ));
        }
        Ok(())
    }
}

/// The largest of `least..=most` for which the monotonic `holds` is true, or `least`.
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
