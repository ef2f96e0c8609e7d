//! All KV pages: free ones, those in use, and cached ones in the order of their eviction.

mod announcement;
mod copy_offer;
mod eviction;
pub(crate) mod pin;
mod recurrence;
pub(crate) mod retention;
mod settled;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::cache::kv_cache::copy_offer::CopyOffers;
use crate::cache::kv_cache::eviction::Removed;
use crate::cache::kv_cache::pin::Pins;
use crate::cache::kv_cache::retention::Retained;
use crate::cache::kv_event::KvWatch;
use crate::cache::page_pool::PagePool;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::{KnownPath, Parent, PrefixMatch, PrefixTree};
use crate::cache::residency::{Residency, Resident};
use crate::{
    BlockId, FetchMedium, FetchedTokens, KvGroup, Namespace, PageId, PageState, SnapshotId, StepId,
    TokenId,
};

/// The KV pages and their content. A page is in one of three states, whose counts always add up to `num_pages`:
/// * in use: page tables name it, and each of them holds one lock;
/// * cached: it holds the KV of a block and is not locked;
/// * free.
///
/// The scheduler has one cache. Benchmarks and trace replays drive one on its own.
///
/// The tree holds blocks, and a block has at most one page in each KV group (`residency.rs`).
///
/// In groups without a window, the published pages of a table are the pages of a path from a root. So the page before a
/// locked page is locked as well, and all cached pages can be evicted leaf by leaf, each together with its block. In
/// groups with a window, a page is evicted alone, even before the pages after it, because queries beyond the window do
/// not read it.
#[derive(Debug)]
pub struct KvCache {
    pool: PagePool,
    tree: PrefixTree,
    residency: Residency,
    /// Advances each time a table is released.
    clock: u64,
    /// Cached pages that can be evicted, least recently used first: leaves of the tree, and all pages of groups with
    /// windows. Retained pages have a list of their own.
    evictable: BTreeSet<(u64, PageId)>,
    num_cached: usize,
    num_evicted: u64,
    /// Buffer for evicted blocks and pages, reused so that an eviction does not allocate.
    removed: Removed,
    pins: Pins,
    retained: Retained,
    offers: CopyOffers,
    /// The subscription to KV events, if any.
    watch: Option<Box<KvWatch>>,
}

/// The cached part of a token sequence.
#[derive(Debug, PartialEq)]
pub(crate) struct FoundPrefix {
    /// The blocks of the cached tokens.
    pub path: Vec<BlockId>,
    /// The pages that queries after those tokens read.
    pub tables: PageTables,
    pub donor: Option<Donor>,
    /// The number of the sequence's blocks in the tree. Of these, blocks after the last snapshot have to be computed
    /// again.
    pub num_matched: usize,
    /// The number of blocks that the next step would find, when it can restore the snapshots that this step takes.
    pub num_found_next: usize,
}

/// A block whose first rows continue a match and can be copied.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Donor {
    /// The block's page in each group.
    pub pages: Vec<PageId>,
    pub num_rows: u32,
}

impl FoundPrefix {
    pub fn nothing(num_groups: usize) -> Self {
        Self {
            path: Vec::new(),
            tables: PageTables::new(num_groups),
            donor: None,
            num_matched: 0,
            num_found_next: 0,
        }
    }

    pub fn num_rows(&self, page_size: u32) -> u32 {
        let num_donated_rows = self.donor.as_ref().map_or(0, |donor| donor.num_rows);
        self.path.len() as u32 * page_size + num_donated_rows
    }
}

impl KvCache {
    pub fn new(num_pages: u32, page_size: u32, groups: &[KvGroup]) -> Self {
        Self {
            pool: PagePool::new(num_pages),
            tree: PrefixTree::new(num_pages, page_size),
            residency: Residency::new(num_pages, groups),
            clock: 0,
            evictable: BTreeSet::new(),
            num_cached: 0,
            num_evicted: 0,
            removed: Removed::default(),
            pins: Pins::new(num_pages),
            retained: Retained::default(),
            offers: CopyOffers::default(),
            watch: None,
        }
    }

    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    pub fn num_in_use(&self) -> usize {
        self.pool.num_pages() - self.num_free() - self.num_cached
    }

    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    pub fn num_pinned(&self) -> usize {
        self.pins.len()
    }

    pub fn is_pinned(&self, page: PageId) -> bool {
        self.pins.has(page)
    }

    /// The number of pages that `try_allocate` can provide.
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_cached
    }

    pub fn is_locked(&self, page: PageId) -> bool {
        self.pool.num_locks(page) > 0
    }

    /// The blocks of a token sequence in the tree, with or without pages.
    pub fn match_prefix(&self, namespace: &Namespace, tokens: &[TokenId]) -> PrefixMatch {
        let known = &mut KnownPath::default();
        self.tree.match_prefix(namespace, tokens, known)
    }

    /// The cached prefix of a token sequence. `known` is the result of an earlier look-up of the same tokens. Rows are
    /// copied only from pages filled before `step`, and only snapshots taken before `step` are restored.
    pub(crate) fn find_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
        known: &mut KnownPath,
    ) -> FoundPrefix {
        let PrefixMatch { mut blocks, donor } = self.tree.match_prefix(namespace, tokens, known);
        let num_blocks = self.num_usable(&blocks, step);
        let num_found_next = match self.is_recurrent() {
            true => self.num_usable(&blocks, StepId(step.0 + 1)),
            false => num_blocks,
        };
        // Rows in the middle of a block are useless without the state after them.
        let donor = donor.filter(|_| num_blocks == blocks.len() && !self.is_recurrent());
        let num_matched = blocks.len();
        blocks.truncate(num_blocks);
        FoundPrefix {
            tables: self.tables_of(&blocks),
            donor: donor.and_then(|(block, num_rows)| self.donor(block, num_rows, step)),
            path: blocks,
            num_matched,
            num_found_next,
        }
    }

    /// The number of blocks at the beginning of a path that a request starting in `step` can use.
    pub(crate) fn num_usable(&self, path: &[BlockId], step: StepId) -> usize {
        self.residency.num_usable(path, self.page_size(), step)
    }

    /// The pages that a query after a path reads.
    pub(crate) fn tables_of(&self, path: &[BlockId]) -> PageTables {
        let mut tables = PageTables::new(self.residency.groups().len());
        let num_rows = path.len() as u32 * self.page_size();
        for (index, table) in tables.iter_mut().enumerate() {
            let group = self.residency.groups()[index];
            let first = group.first_page_read(num_rows, self.page_size()) as usize;
            let pages = path[first..].iter();
            table.num_gone = first;
            table.pages = pages
                .filter_map(|&block| self.residency.page(block, index))
                .collect();
        }
        tables
    }

    /// The pages of a block that lends its first rows, if all groups have one.
    fn donor(&self, block: BlockId, num_rows: u32, step: StepId) -> Option<Donor> {
        let pages: Vec<_> = self.residency.pages(block).collect();
        let is_whole = pages.len() == self.residency.groups().len();
        let lends = is_whole && self.residency.filled_by(block) < Some(step);
        lends.then_some(Donor { pages, num_rows })
    }

    pub fn page_size(&self) -> u32 {
        self.tree.page_size() as u32
    }

    /// The page of a block in a group, by the group's index.
    pub fn page(&self, block: BlockId, group: usize) -> Option<PageId> {
        self.residency.page(block, group)
    }

    /// Appends `num_pages` pages to a table, each locked once, and evicts cached pages for them as needed. If the pool
    /// has too few, returns false and changes nothing.
    pub fn try_allocate(&mut self, num_pages: usize, table: &mut Vec<PageId>) -> bool {
        if num_pages > self.num_available() {
            return false;
        }
        self.offers.note_taken(num_pages);
        for _ in 0..num_pages {
            if self.pool.num_free() == 0 {
                self.num_evicted += 1;
                // All other cached pages go before retained ones.
                self.retained.note_evicted(self.evictable.is_empty());
                self.evict_one();
            }
            table.extend(self.pool.try_take());
        }
        true
    }

    /// Extends each group's table to the length that `end` gives. If the pool has too few pages for all groups, returns
    /// false and changes nothing.
    pub(crate) fn try_extend(
        &mut self,
        tables: &mut PageTables,
        end: impl Fn(usize) -> usize,
    ) -> bool {
        let missing = tables.iter().enumerate();
        let missing = missing.map(|(group, table)| end(group).saturating_sub(table.len()));
        if missing.sum::<usize>() > self.num_available() {
            return false;
        }
        for (group, table) in tables.iter_mut().enumerate() {
            let num_pages = end(group).saturating_sub(table.len());
            self.try_allocate(num_pages, &mut table.pages);
        }
        true
    }

    pub fn lock(&mut self, page: PageId) {
        if self.pool.lock(page) == 1 {
            self.num_cached -= 1;
            self.unlist(page);
        }
    }

    /// Unlocks a table's pages and marks them as used now.
    pub fn unlock_all(&mut self, pages: impl IntoIterator<Item = PageId>) {
        self.clock += 1;
        for page in pages {
            if self.pool.unlock(page) > 0 {
                continue;
            }
            if self.residency.is_resident(page) {
                self.num_cached += 1;
                self.list_used(page, self.clock);
            } else {
                self.pool.free(page);
            }
        }
    }

    /// Enters a block in the prefix tree, with its locked pages, indexed by group. The pages' rows may be read after
    /// `filled_by` has returned, and by other spans of that step.
    ///
    /// If the tree has a block with these tokens, that block takes only the pages that it lacks in groups with windows.
    /// `Err` names that block when it already has pages in groups without a window. The caller then keeps its own
    /// pages.
    pub fn publish(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: impl Fn(usize) -> Option<PageId>,
        filled_by: StepId,
    ) -> Result<BlockId, BlockId> {
        let removed = &mut self.removed.from_tree;
        let inserted = self.tree.insert(parent, tokens, removed);
        if !removed.blocks.is_empty() {
            self.drop_removed();
            self.removed.clear();
        }
        let block = match inserted {
            Ok(block) => block,
            Err(there) => {
                if self.tree.block_tokens(there).len() == tokens.len() {
                    self.fill_block(there, page, filled_by);
                }
                self.touch(there);
                return match self.residency.fills_all_blocks() {
                    true => Err(there),
                    false => Ok(there),
                };
            }
        };
        self.residency.add_block(block);
        if self.watch.is_some() {
            self.watch_block(block, filled_by);
        }
        for group in 0..self.residency.groups().len() {
            if let Some(page) = page(group) {
                self.give_page(block, group, page, filled_by);
            }
        }
        if self.watch.is_some() {
            self.announce(block);
        }
        if let Parent::Block(parent) = parent {
            self.unlist_inner(parent);
        }
        Ok(block)
    }

    /// Gives a block locked pages in the groups in which it has none.
    pub(crate) fn fill_block(
        &mut self,
        block: BlockId,
        page: impl Fn(usize) -> Option<PageId>,
        filled_by: StepId,
    ) {
        for group in 0..self.residency.groups().len() {
            if self.residency.page(block, group).is_none()
                && let Some(page) = page(group)
            {
                self.give_page(block, group, page, filled_by);
            }
        }
    }

    #[inline]
    fn give_page(&mut self, block: BlockId, group: usize, page: PageId, filled_by: StepId) {
        debug_assert!(self.is_locked(page));
        let has_window = self.residency.groups()[group].window.is_some();
        let depth = if has_window {
            self.tree.depth(block)
        } else {
            0
        };
        self.residency.add(block, group, depth, page, filled_by);
        if self.watch.is_some() {
            self.announce_behind(block, group);
        }
    }

    /// Marks a block's cached pages as used.
    fn touch(&mut self, block: BlockId) {
        for group in 0..self.residency.groups().len() {
            if let Some(page) = self.residency.page(block, group)
                && !self.is_locked(page)
            {
                self.unlist(page);
                self.list_used(page, self.clock + 1);
            }
        }
    }

    /// The whole block of `tokens` that follows `parent`, if any.
    pub(crate) fn child(&self, parent: Parent, tokens: &[TokenId]) -> Option<BlockId> {
        self.tree.child(parent, tokens)
    }

    /// The whole blocks that follow a block.
    pub(crate) fn children(&self, block: BlockId) -> Vec<BlockId> {
        self.tree.children(block).collect()
    }

    /// The number of the insertion that put a block into the tree.
    pub(crate) fn insertion(&self, block: BlockId) -> Option<u64> {
        self.tree.insertion(block)
    }

    pub(crate) fn has_windows(&self) -> bool {
        self.residency.has_windows()
    }

    /// Moves the end of a request's path from one block to another.
    pub(crate) fn move_end(&mut self, from: Option<BlockId>, to: Option<BlockId>) {
        if let Some(to) = to {
            self.tree.add_end(to);
        }
        if let Some(from) = from {
            self.tree.remove_end(from);
            self.prune(from);
        }
    }

    /// The step whose return makes a page ready. `None` if the page has no block.
    pub fn filled_by(&self, page: PageId) -> Option<StepId> {
        let resident = self.residency.resident(page)?;
        Some(resident.filled_by)
    }

    /// Records that a fetch has brought a page.
    pub(crate) fn note_fetched(&mut self, page: PageId, medium: FetchMedium) {
        self.residency.note_fetched(page, medium);
    }

    /// Records a request's use of a path. Returns the tokens of the blocks that a fetch has brought for this first use.
    pub(crate) fn use_fetched(&mut self, path: &[BlockId]) -> FetchedTokens {
        let mut fetched = FetchedTokens::default();
        for &block in path {
            if let Some(medium) = self.residency.use_fetched(block) {
                fetched.add(medium, self.page_size());
            }
        }
        fetched
    }

    /// The step whose return makes all pages of a block ready.
    pub(crate) fn block_filled_by(&self, block: BlockId) -> Option<StepId> {
        self.residency.filled_by(block)
    }

    /// Whether `step` or a later step fills a block in the groups without a window. If all groups have windows, no
    /// block counts as new, because each page is evicted alone.
    pub(crate) fn is_new_since(&self, block: BlockId, step: StepId) -> bool {
        self.residency.fills_all_blocks() && self.residency.filled_by_without_window(block) >= step
    }

    /// The state of a page in the cache: free, cached or in use.
    pub(crate) fn page_state(&self, page: PageId) -> PageState {
        if self.is_locked(page) {
            PageState::InUse
        } else if self.residency.is_resident(page) {
            PageState::Cached
        } else {
            PageState::Free
        }
    }

    pub fn num_locks(&self, page: PageId) -> u32 {
        self.pool.num_locks(page)
    }

    #[cfg(test)]
    pub(crate) fn num_blocks(&self) -> usize {
        self.tree.num_blocks()
    }

    /// The block whose KV a page holds.
    pub(crate) fn block_of(&self, page: PageId) -> Option<BlockId> {
        let resident = self.residency.resident(page)?;
        Some(resident.block)
    }

    pub(crate) fn block_before(&self, block: BlockId) -> Option<BlockId> {
        self.tree.block_before(block)
    }

    /// The number of blocks up to the end of a path.
    pub(crate) fn path_len(&self, end: Option<BlockId>) -> usize {
        end.map_or(0, |end| self.tree.depth(end) + 1)
    }

    /// # Panics
    /// Panics when a page is in two states or none, or cannot be evicted.
    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        let mut is_free = alloc::vec![false; self.pool.num_pages()];
        for &page in self.pool.free_pages() {
            let is_twice = core::mem::replace(&mut is_free[page.0 as usize], true);
            assert!(!is_twice, "page {page} is free twice");
        }
        let mut num_cached = 0;
        let mut num_pinned = 0;
        let mut num_listed = 0;
        for page in (0..self.pool.num_pages() as u32).map(PageId) {
            let is_locked = self.is_locked(page);
            let is_cached = !is_locked && self.residency.is_resident(page);
            let num_states = usize::from(is_free[page.0 as usize])
                + usize::from(is_locked)
                + usize::from(is_cached);
            assert_eq!(num_states, 1, "page {page} is in two states or none");
            num_cached += usize::from(is_cached);
            let is_pinned = self.is_pinned(page);
            num_pinned += usize::from(is_pinned);
            let is_kept = is_locked && self.residency.is_resident(page);
            assert!(
                !is_pinned || is_kept,
                "page {page} is pinned, but not in the tree"
            );
            let resident = self.residency.resident(page);
            let is_listed = |it: Resident| match self.retained.has(page) {
                true => self.retained.is_listed(page),
                false => self.evictable.contains(&(it.last_used(), page)),
            };
            let is_leaf = |it| is_cached && self.is_leaf(it);
            assert_eq!(
                resident.is_some_and(is_listed),
                resident.is_some_and(is_leaf),
                "page {page} is listed for eviction and no cached leaf, or the reverse"
            );
            num_listed += usize::from(resident.is_some_and(is_listed));
            self.check_order(page);
        }
        assert_eq!(
            num_listed,
            self.evictable.len() + self.retained.num_listed(),
            "a page is listed for eviction twice, or without a block"
        );
        assert_eq!(
            num_cached, self.num_cached,
            "the number of cached pages is wrong"
        );
        assert_eq!(
            num_pinned,
            self.pins.len(),
            "the number of pinned pages is wrong"
        );
        self.residency
            .check_invariants(|block| self.tree.insertion(block).is_some());
        self.check_retention();
        self.check_watch();
    }

    /// # Panics
    /// Panics when other snapshots than `held` are held.
    pub(crate) fn check_held_snapshots(&self, held: impl Iterator<Item = SnapshotId>) {
        if let Some(snapshots) = self.residency.snapshots() {
            snapshots.check_holders(held);
        }
    }

    /// # Panics
    /// Panics when the counts of paths that end at blocks are wrong. `ends` are the ends of all requests' paths.
    pub(crate) fn check_ends(&self, ends: impl Iterator<Item = BlockId>) {
        let mut num_ends = BTreeMap::new();
        for end in ends {
            *num_ends.entry(end).or_insert(0) += 1;
        }
        let is_end = |&block: &BlockId| self.tree.num_ends(block) > 0;
        let counted = self.tree.blocks().filter(is_end);
        let counted = counted.map(|block| (block, self.tree.num_ends(block)));
        assert!(counted.eq(num_ends), "the ends of paths are counted wrong");
        for block in self.tree.whole_blocks() {
            assert!(
                self.tree.num_ends(block) > 0
                    || self.residency.pages(block).next().is_some()
                    || !self.tree.is_leaf(block),
                "block {block} leads nowhere"
            );
        }
    }

    /// In a group without a window, the page before a cached page has the same or a later last use, and the page before
    /// a locked page is locked.
    fn check_order(&self, page: PageId) {
        let Some(resident) = self.residency.resident(page) else {
            return;
        };
        if self.residency.has_window(resident) {
            return;
        }
        let before = self.tree.block_before(resident.block);
        let before = before.and_then(|before| self.residency.page(before, resident.group()));
        let Some(before) = before else {
            return;
        };
        let times =
            [before, page].map(|page| self.residency.resident(page).map(|it| it.last_used()));
        match self.is_locked(page) {
            false => assert!(
                times[0] >= times[1] || self.is_locked(before),
                "page {before} has an earlier last use than page {page} after it"
            ),
            true => assert!(
                self.is_locked(before),
                "page {page} is locked and the page {before} before it is not"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "the ends of paths are counted wrong")]
    fn an_end_that_no_request_has_is_noticed() {
        let mut cache = KvCache::new(4, 4, &[KvGroup::default()]);
        let mut pages = Vec::new();
        assert!(cache.try_allocate(1, &mut pages));
        let namespace = Namespace::default();
        let parent = Parent::Root(&namespace);
        let block = cache.publish(parent, &[1, 2, 3, 4], |_| Some(pages[0]), StepId(0));
        cache.move_end(None, block.ok());
        cache.check_ends(core::iter::empty());
    }
}
