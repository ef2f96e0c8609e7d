//! The blocks of a path in the file, and the pages that are copied to or from the file.

use std::ops::Range;

use corella_core::{BlockHasher, BlockList, PageHash, PageId, PageTable, Request};

use super::slot::{PageKey, PageName, SlotNamespace};

/// A sequence's whole blocks, as the scheduler and as the file name them.
#[derive(Clone)]
pub(super) struct DiskPath {
    pub list: BlockList,
    namespace: SlotNamespace,
    /// The hashes of the blocks in the file.
    pub hashes: Vec<PageHash>,
}

impl DiskPath {
    pub fn new(
        list: BlockList,
        namespace: SlotNamespace,
        hasher: &BlockHasher,
        page_size: u32,
    ) -> Self {
        let names = namespace.of_hashes();
        // Without a salt and an adapter, the file names blocks as the scheduler does.
        let hashes = match names == list.namespace {
            true => list.hashes.clone(),
            false => hasher.hashes(&names, &list.tokens, page_size).collect(),
        };
        Self {
            hashes,
            list,
            namespace,
        }
    }

    pub fn num_blocks(&self) -> u32 {
        self.hashes.len() as u32
    }

    /// Leaves out all but the first `num_blocks` blocks.
    pub fn truncate(&mut self, num_blocks: u32, page_size: u32) {
        self.list.truncate(num_blocks, page_size);
        self.hashes.truncate(num_blocks as usize);
    }

    /// The parts of the recurrent state after the path. They have no page of the pool.
    pub fn state_pages(&self, groups: Range<u32>) -> impl Iterator<Item = PathPage> {
        let block = self.num_blocks() - 1;
        groups.map(move |group| PathPage {
            block,
            group,
            page: PageId(0),
        })
    }

    /// The names of the parts of the recurrent state after the path.
    pub fn state_names(&self, groups: Range<u32>) -> impl Iterator<Item = PageName<'_>> {
        groups.map(|group| self.name(self.num_blocks() - 1, group))
    }

    fn name(&self, block: u32, group: u32) -> PageName<'_> {
        let at = block as usize;
        let page_size = self.list.tokens.len() / self.hashes.len();
        PageName {
            key: PageKey {
                hash: self.hashes[at],
                group,
            },
            namespace: self.namespace,
            parent: at.checked_sub(1).map(|parent| self.hashes[parent]),
            depth: block,
            tokens: &self.list.tokens[at * page_size..(at + 1) * page_size],
        }
    }
}

/// The whole blocks of a request's tokens, without its last token, which is always computed for its logits.
pub(super) fn known_blocks(request: &Request, hasher: &BlockHasher, page_size: u32) -> BlockList {
    let tokens = request.prompt.iter().chain(&request.output);
    let mut tokens: Vec<_> = tokens.copied().collect();
    let num_blocks = tokens.len().saturating_sub(1) / page_size as usize;
    tokens.truncate(num_blocks * page_size as usize);
    BlockList::new(request.namespace.clone(), tokens, hasher, page_size)
}

/// The whole blocks of a list of another node, which may have named them wrongly.
pub(super) fn checked_blocks(list: &BlockList, hasher: &BlockHasher, page_size: u32) -> BlockList {
    let num_blocks = list.tokens.len() / page_size as usize;
    let tokens = list.tokens[..num_blocks * page_size as usize].to_vec();
    BlockList::new(list.namespace.clone(), tokens, hasher, page_size)
}

/// A page of the pool, and the place of its rows in a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PathPage {
    /// The number of blocks before the page's block.
    pub block: u32,
    pub group: u32,
    pub page: PageId,
}

impl PathPage {
    pub fn name<'a>(&self, path: &'a DiskPath) -> PageName<'a> {
        path.name(self.block, self.group)
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
