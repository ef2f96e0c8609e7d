//! KV groups: sets of layers that have page tables of their own.

/// A set of layers that share page tables, because all of them read the same positions. The executor assigns layers to
/// groups. All groups take their pages from one pool; a page belongs to one group while it is used.
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

    /// The first page of a prompt of `num_rows` rows that another node needs to continue after the prompt, or to
    /// compute the prompt's last row again.
    pub fn first_page_exported(&self, num_rows: u32, page_size: u32) -> u32 {
        self.first_page_read(num_rows.saturating_sub(1), page_size)
    }

    /// The largest number of pages that a request needs at once, if it has `num_rows` rows at its end and computes at
    /// most `num_rows_at_once` rows at once.
    pub fn num_pages(&self, num_rows: u32, num_rows_at_once: u32, page_size: u32) -> u32 {
        let num_pages = num_rows.div_ceil(page_size);
        match self.window {
            None => num_pages,
            Some(window) => {
                let num_rows_read = (window - 1).saturating_add(num_rows_at_once.max(1));
                // At worst, the first of these rows is the last of its page, and the other rows begin a new page.
                let num_touched = (num_rows_read - 1).div_ceil(page_size).saturating_add(1);
                num_pages.min(num_touched)
            }
        }
    }
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
