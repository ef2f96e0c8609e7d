//! The page tables of a sequence that has all KV pages to itself.

use std::ops::Range;

use corella_core::{KvGroup, PageId};

use crate::kv::PageTable;

/// The pages of a sequence that is computed chunk by chunk and alone. A group with a window takes its
/// pages again when the window has passed them.
pub struct LonePages {
    page_size: u32,
    groups: Vec<LoneGroup>,
}

struct LoneGroup {
    group: KvGroup,
    first_page: u32,
    num_pages: u32,
    /// The first entry that the current chunk reads, and the pages from there on.
    first: usize,
    pages: Vec<PageId>,
}

impl LonePages {
    /// Pages for a sequence of `num_tokens` tokens in chunks of at most `max_rows`.
    pub fn new(groups: &[KvGroup], num_tokens: u32, max_rows: u32, page_size: u32) -> Self {
        let mut next_page = 0;
        let lone_group = |group: &KvGroup| {
            let num_pages = group.num_pages(num_tokens, max_rows, page_size);
            let first_page = next_page;
            next_page += num_pages;
            LoneGroup {
                group: *group,
                first_page,
                num_pages,
                first: 0,
                pages: Vec::new(),
            }
        };
        Self {
            page_size,
            groups: groups.iter().map(lone_group).collect(),
        }
    }

    pub fn num_pages(&self) -> usize {
        let num_pages = self.groups.iter().map(|group| group.num_pages as usize);
        num_pages.sum()
    }

    /// What the given positions read and write.
    pub fn tables(&mut self, positions: Range<u32>) -> impl Iterator<Item = PageTable<'_>> {
        let (start, end) = (positions.start, positions.end.div_ceil(self.page_size));
        for group in &mut self.groups {
            let first = group.group.first_page_read(start, self.page_size);
            let page = |entry| PageId(group.first_page + entry % group.num_pages);
            group.first = first as usize;
            group.pages.clear();
            group.pages.extend((first..end).map(page));
        }
        let groups = self.groups.iter();
        groups.map(|group| PageTable::new(group.first, &group.pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_again_behind_the_window_and_no_sooner() {
        let groups = [None, Some(3), Some(10)].map(|window| KvGroup { window });
        let (num_tokens, max_rows, page_size) = (50, 6, 4);
        let mut lone = LonePages::new(&groups, num_tokens, max_rows, page_size);
        assert!(lone.num_pages() < 3 * 13);
        // Who wrote last to each page, as group and position.
        let mut rows = vec![None; lone.num_pages() * page_size as usize];
        for start in (0..num_tokens).step_by(max_rows as usize) {
            let end = num_tokens.min(start + max_rows);
            for (group, table) in lone.tables(start..end).enumerate() {
                let row = |position: u32| {
                    let page = table.page((position / page_size) as usize);
                    page * page_size as usize + (position % page_size) as usize
                };
                (start..end).for_each(|position| rows[row(position)] = Some((group, position)));
                for query in start..end {
                    for read in groups[group].first_row_read(query)..=query {
                        assert_eq!(rows[row(read)], Some((group, read)), "query {query}");
                    }
                }
            }
        }
    }
}
