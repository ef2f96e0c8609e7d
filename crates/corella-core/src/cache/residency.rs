//! Residency: the pages that hold the KV of each block, at most one in each KV group.
//!
//! In groups without a window, every block of the prefix tree has its page. In groups with a window, pages are evicted
//! alone, so that a block may lack them. Then only queries that do not read the missing pages can use the block. If all
//! groups have windows, a block without any page may lead to blocks with pages.
//!
//! Recurrent layers have no pages. Some blocks have a snapshot of their state, and a prefix can be used only up to such
//! a block.

use alloc::vec::Vec;
use core::num::NonZeroU32;

use crate::cache::snapshot::Snapshots;
use crate::{BlockId, FetchMedium, KvGroup, PageId, StepId};

/// The number of low bits in a time of last use. They order pages that were last used at the same time.
const DEPTH_BITS: u32 = 31;

#[derive(Debug)]
pub(crate) struct Residency {
    groups: Vec<KvGroup>,
    num_windows: usize,
    /// The page of each block in each group, sorted by block and then by group.
    pages: Vec<Option<PageId>>,
    /// The resident of each page, by page.
    residents: Vec<Option<Resident>>,
    /// `None` for a model without recurrent layers.
    snapshots: Option<Snapshots>,
}

/// The KV that a page of the prefix cache holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident {
    pub block: BlockId,
    /// The step whose return makes the page ready.
    pub filled_by: StepId,
    /// The time at which the page's last lock was removed, if it has no lock.
    last_used: u64,
    /// The number of blocks up to the end of the page's block; 1 in a group without a window, where eviction does not
    /// depend on this number.
    num_blocks: NonZeroU32,
    group: u8,
    /// The medium from which a fetch has brought the page, until a request uses it.
    fetched_from: Option<FetchMedium>,
}

impl Resident {
    pub fn group(&self) -> usize {
        usize::from(self.group)
    }

    pub fn last_used(&self) -> u64 {
        self.last_used
    }
}

impl Residency {
    pub fn new(num_pages: u32, groups: &[KvGroup]) -> Self {
        let windows = groups.iter().filter(|group| group.window.is_some());
        Self {
            groups: groups.to_vec(),
            num_windows: windows.count(),
            pages: Vec::with_capacity(num_pages as usize),
            residents: alloc::vec![None; num_pages as usize],
            snapshots: None,
        }
    }

    pub fn keep_snapshots(&mut self, num_snapshots: u32) {
        self.snapshots = Some(Snapshots::new(num_snapshots));
    }

    pub fn snapshots(&self) -> Option<&Snapshots> {
        self.snapshots.as_ref()
    }

    pub fn snapshots_mut(&mut self) -> Option<&mut Snapshots> {
        self.snapshots.as_mut()
    }

    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    pub fn has_windows(&self) -> bool {
        self.num_windows > 0
    }

    /// Whether every block has pages, because some group has no window.
    pub fn fills_all_blocks(&self) -> bool {
        self.num_windows < self.groups.len()
    }

    /// Makes room for the pages of a block.
    pub fn add_block(&mut self, block: BlockId) {
        let end = (block.0 as usize + 1) * self.groups.len();
        if self.pages.len() < end {
            self.pages.resize(end, None);
        }
    }

    pub fn page(&self, block: BlockId, group: usize) -> Option<PageId> {
        self.pages[block.0 as usize * self.groups.len() + group]
    }

    /// The pages that a block has.
    pub fn pages(&self, block: BlockId) -> impl Iterator<Item = PageId> {
        let first = block.0 as usize * self.groups.len();
        let pages = &self.pages[first..first + self.groups.len()];
        pages.iter().flatten().copied()
    }

    pub fn resident(&self, page: PageId) -> Option<Resident> {
        self.residents[page.0 as usize]
    }

    pub fn is_resident(&self, page: PageId) -> bool {
        self.residents[page.0 as usize].is_some()
    }

    /// Whether a page can be evicted without its block.
    pub fn has_window(&self, resident: Resident) -> bool {
        self.groups[resident.group()].window.is_some()
    }

    /// The step whose return makes all pages of a block ready. `None` for a block without pages.
    pub fn filled_by(&self, block: BlockId) -> Option<StepId> {
        let pages = self.pages(block).filter_map(|page| self.resident(page));
        pages.map(|resident| resident.filled_by).max()
    }

    /// The step whose return makes a block's pages in groups without a window ready.
    pub fn filled_by_without_window(&self, block: BlockId) -> StepId {
        let residents = self.pages(block).filter_map(|page| self.resident(page));
        let full = residents.filter(|resident| !self.has_window(*resident));
        let filled_by = full.map(|resident| resident.filled_by);
        filled_by.max().unwrap_or(StepId(0))
    }

    /// Records a page's last use, which orders evictions. Pages in groups with windows and the same last use are
    /// evicted from the end of their path, because prefixes without the end can still be found.
    pub fn note_used(&mut self, page: PageId, clock: u64) {
        if let Some(resident) = &mut self.residents[page.0 as usize] {
            let has_window = self.groups[resident.group()].window.is_some();
            let from_end = match has_window {
                true => (1 << DEPTH_BITS) - u64::from(resident.num_blocks.get()),
                false => 0,
            };
            resident.last_used = clock << DEPTH_BITS | from_end;
        }
    }

    pub fn add(
        &mut self,
        block: BlockId,
        group: usize,
        depth: usize,
        page: PageId,
        filled_by: StepId,
    ) {
        debug_assert!(!self.is_resident(page));
        self.pages[block.0 as usize * self.groups.len() + group] = Some(page);
        self.residents[page.0 as usize] = Some(Resident {
            block,
            filled_by,
            last_used: 0,
            num_blocks: NonZeroU32::MIN.saturating_add(depth as u32),
            group: group as u8,
            fetched_from: None,
        });
    }

    /// Records that a fetch has brought a page.
    pub fn note_fetched(&mut self, page: PageId, medium: FetchMedium) {
        if let Some(resident) = &mut self.residents[page.0 as usize] {
            resident.fetched_from = Some(medium);
        }
    }

    /// Records a use of a block. Returns the medium from which a fetch has brought a page of the block for this use.
    pub fn use_fetched(&mut self, block: BlockId) -> Option<FetchMedium> {
        let mut medium = None;
        for group in 0..self.groups.len() {
            if let Some(page) = self.page(block, group)
                && let Some(resident) = &mut self.residents[page.0 as usize]
            {
                medium = resident.fetched_from.take().or(medium);
            }
        }
        medium
    }

    /// Takes from a block its page in a group. Returns the page with the time of its last use.
    pub fn take(&mut self, block: BlockId, group: usize) -> Option<(PageId, u64)> {
        let page = self.pages[block.0 as usize * self.groups.len() + group].take()?;
        let resident = self.residents[page.0 as usize].take()?;
        Some((page, resident.last_used))
    }

    /// The number of blocks at the beginning of a path that a request starting in `step` can use: the pages that a
    /// query after them reads are present, and earlier steps take the snapshot to continue from.
    pub fn num_usable(&self, path: &[BlockId], page_size: u32, step: StepId) -> usize {
        let mut num_blocks = path.len();
        loop {
            let num_in_windows = self.num_in_windows(&path[..num_blocks], page_size);
            let num_restored = self.num_restorable(&path[..num_in_windows], step);
            if num_restored == num_blocks {
                return num_blocks;
            }
            num_blocks = num_restored;
        }
    }

    /// The number of blocks of a path after which a query finds all pages that it reads in groups with windows.
    fn num_in_windows(&self, path: &[BlockId], page_size: u32) -> usize {
        let mut num_blocks = path.len();
        let mut is_shorter = self.has_windows();
        while is_shorter {
            is_shorter = false;
            for (index, group) in self.groups.iter().enumerate() {
                if group.window.is_none() {
                    continue;
                }
                let first = group.first_page_read(num_blocks as u32 * page_size, page_size);
                let is_missing = |&at: &usize| self.page(path[at], index).is_none();
                // After each prefix that ends between this page and block `num_blocks`, a query reads the missing page,
                // too. So the next prefix to try ends before the page.
                if let Some(missing) = (first as usize..num_blocks).rev().find(is_missing) {
                    num_blocks = missing;
                    is_shorter = true;
                }
            }
        }
        num_blocks
    }

    /// The number of blocks up to the last one whose snapshot `step` can restore. A step restores snapshots before it
    /// takes any.
    fn num_restorable(&self, path: &[BlockId], step: StepId) -> usize {
        let Some(snapshots) = &self.snapshots else {
            return path.len();
        };
        let is_ready = |block: &BlockId| snapshots.is_ready(*block, step);
        path.iter().rposition(is_ready).map_or(0, |last| last + 1)
    }

    /// # Panics
    /// Panics when a block and its pages do not name each other.
    pub fn check_invariants(&self, is_in_tree: impl Fn(BlockId) -> bool) {
        if let Some(snapshots) = &self.snapshots {
            snapshots.check_invariants(&is_in_tree);
        }
        let mut num_pages = 0;
        for (at, page) in self.pages.iter().enumerate() {
            let Some(page) = page else { continue };
            num_pages += 1;
            let (block, group) = (at / self.groups.len(), at % self.groups.len());
            let resident = self
                .resident(*page)
                .map(|it| (it.block.0 as usize, it.group.into()));
            assert_eq!(
                resident,
                Some((block, group)),
                "page {page} holds another block"
            );
        }
        let residents = self.residents.iter().flatten();
        assert_eq!(
            residents.count(),
            num_pages,
            "a page's block has another page"
        );
        let num_blocks = (self.pages.len() / self.groups.len()) as u32;
        for block in (0..num_blocks).map(BlockId) {
            let pages =
                self.groups.iter().enumerate().map(|(index, group)| {
                    (group.window.is_some(), self.page(block, index).is_some())
                });
            for (has_window, is_there) in pages {
                assert!(
                    is_in_tree(block) || !is_there,
                    "block {block} is not in the tree and has pages"
                );
                assert!(
                    has_window || is_there == is_in_tree(block),
                    "block {block} lacks a page in a group without a window"
                );
            }
        }
    }
}
