//! The pages of a path that are copied to or from the file.

use std::ops::Range;

use corella_core::{BlockList, PageId, PageTable};

use super::slot::{PageKey, PageName};

/// A page of the pool, and the place of its rows in a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PathPage {
    /// The number of blocks before the page's block.
    pub block: u32,
    pub group: u32,
    pub page: PageId,
}

impl PathPage {
    pub fn key(&self, list: &BlockList) -> PageKey {
        PageKey {
            hash: list.hashes[self.block as usize],
            group: self.group,
        }
    }

    pub fn name<'a>(&self, list: &'a BlockList) -> PageName<'a> {
        name(list, self.block, self.group)
    }
}

/// The names of the parts of the recurrent state after a path.
pub(super) fn state_names(
    list: &BlockList,
    groups: Range<u32>,
) -> impl Iterator<Item = PageName<'_>> {
    let last = list.hashes.len() as u32 - 1;
    groups.map(move |group| name(list, last, group))
}

fn name(list: &BlockList, block: u32, group: u32) -> PageName<'_> {
    let at = block as usize;
    let page_size = list.tokens.len() / list.hashes.len();
    PageName {
        key: PageKey {
            hash: list.hashes[at],
            group,
        },
        parent: at.checked_sub(1).map(|parent| list.hashes[parent]),
        depth: block,
        tokens: &list.tokens[at * page_size..(at + 1) * page_size],
    }
}

/// The pages of all groups' tables, in order of their blocks.
pub(super) fn path_pages(tables: &[PageTable]) -> Vec<PathPage> {
    let groups = (0..).zip(tables);
    let pages = groups.flat_map(|(group, table)| {
        let pages = (table.num_gone as u32..).zip(&table.pages);
        pages.map(move |(block, &page)| PathPage { block, group, page })
    });
    let mut pages: Vec<_> = pages.collect();
    pages.sort_unstable();
    pages
}
