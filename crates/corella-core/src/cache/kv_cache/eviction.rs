//! Eviction: the order in which cached pages make room for others, and how blocks and pages leave the cache.
//!
//! The least recently used pages go first. In groups without a window those are pages of leaves of the prefix tree,
//! each evicted together with its block. In groups with a window, pages are evicted alone. Retained pages
//! (`retention.rs`) follow when no other page is left.

use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::prefix_tree::RemovedBlocks;
use crate::cache::residency::Resident;
use crate::{BlockId, PageId, StepId};

/// If all groups have windows, a block without pages may lead to blocks with pages. A block takes a small part of a
/// page's memory, so the tree may have more blocks than pages.
const MAX_BLOCKS_PER_PAGE: usize = 64;

/// Blocks that have left the tree, and their pages.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    pub from_tree: RemovedBlocks,
    pub pages: Vec<PageId>,
}

impl Removed {
    pub(super) fn clear(&mut self) {
        self.from_tree.blocks.clear();
        self.from_tree.num_ends = 0;
        self.pages.clear();
    }
}

impl KvCache {
    /// Makes sure that the tree can take `num_blocks` more blocks. Returns false when too many blocks of the tree lead
    /// to pages in use.
    pub(crate) fn make_room_for_blocks(&mut self, num_blocks: usize) -> bool {
        let max_blocks = self.pool.num_pages() * MAX_BLOCKS_PER_PAGE;
        while self.tree.num_blocks() + num_blocks > max_blocks {
            if self.num_cached == 0 {
                return false;
            }
            self.evict_one();
        }
        true
    }

    /// Evicts all pages that are neither in a table nor pinned.
    pub fn clear(&mut self) {
        while self.num_cached > 0 {
            self.evict_one();
        }
    }

    /// Removes a block and all blocks after it from the prefix tree, pinned or not. Tables that name pages of these
    /// blocks keep the pages until the tables are released. The caller has to end the paths of requests that end at a
    /// removed block.
    pub(crate) fn unpublish(&mut self, block: BlockId) -> Removed {
        self.remove_blocks(block);
        core::mem::take(&mut self.removed)
    }

    /// Takes from a block what `step` or a later step fills: the snapshot and, in groups with windows, the pages. The
    /// block keeps its other pages.
    pub(crate) fn drop_filled_since(&mut self, block: BlockId, step: StepId) -> Vec<PageId> {
        if self.snapshot_filled_by(block) >= Some(step) {
            self.drop_snapshot_of(block);
        }
        for group in 0..self.residency.groups().len() {
            let has_window = self.residency.groups()[group].window.is_some();
            if let Some(page) = self.residency.page(block, group)
                && has_window
                && self.filled_by(page) >= Some(step)
            {
                self.retract_behind(block, group);
                self.drop_page(block, group);
            }
        }
        core::mem::take(&mut self.removed).pages
    }

    /// Moves a block and all blocks after it from the tree to `removed`.
    fn remove_blocks(&mut self, block: BlockId) {
        let before = self.tree.block_before(block);
        self.tree.remove_from(block, &mut self.removed.from_tree);
        self.drop_removed();
        if let Some(before) = before {
            self.note_block(before);
        }
    }

    /// Removes the pages of a block with a new child from the eviction list.
    #[inline]
    pub(super) fn unlist_inner(&mut self, block: BlockId) {
        for group in 0..self.residency.groups().len() {
            if let Some(page) = self.residency.page(block, group)
                && !self.is_locked(page)
                && let Some(resident) = self.residency.resident(page)
                && !self.is_leaf(resident)
            {
                self.take_off_list(resident.last_used(), page);
            }
        }
    }

    /// Evicts a page and, in a group without a window, its block with all pages.
    pub(super) fn evict_one(&mut self) {
        let page = match self.evictable.first() {
            Some(&(_, page)) => Some(page),
            None => self.retained.next_evictable(),
        };
        let page = page.expect("pages are cached, but none is listed for eviction");
        let resident = self.residency.resident(page).expect("it is cached");
        match self.residency.has_window(resident) {
            true => {
                self.retract_behind(resident.block, resident.group());
                self.drop_page(resident.block, resident.group());
                self.prune(resident.block);
            }
            false => self.remove_blocks(resident.block),
        }
        self.removed.clear();
    }

    /// Takes the pages of removed blocks out of the cache.
    pub(super) fn drop_removed(&mut self) {
        if self.is_recurrent() {
            for at in 0..self.removed.from_tree.blocks.len() {
                self.drop_snapshot_of(self.removed.from_tree.blocks[at]);
            }
        }
        let num_groups = self.residency.groups().len();
        for at in 0..self.removed.from_tree.blocks.len() {
            let block = self.removed.from_tree.blocks[at];
            if let Some(watch) = &mut self.watch {
                watch.note_removed(block);
            }
            for group in 0..num_groups {
                self.drop_page(block, group);
            }
        }
    }

    /// Takes from a block its page in a group. Unpins the page, and frees it if no table holds it.
    pub(super) fn drop_page(&mut self, block: BlockId, group: usize) {
        let Some((page, last_used)) = self.residency.take(block, group) else {
            return;
        };
        self.removed.pages.push(page);
        if self.pins.remove(page) {
            if self.pool.unlock(page) == 0 {
                self.pool.free(page);
            }
        } else if !self.is_locked(page) {
            self.take_off_list(last_used, page);
            self.num_cached -= 1;
            self.pool.free(page);
        }
        self.forget_retention(page);
    }

    /// Removes a block that has no page, no child and no end of a path, and then its ancestors to which the same
    /// applies. If a group has no window, no such block exists.
    #[inline]
    pub(crate) fn prune(&mut self, block: BlockId) {
        if !self.residency.fills_all_blocks() {
            self.prune_path(block);
        }
    }

    fn prune_path(&mut self, mut block: BlockId) {
        while self.tree.num_ends(block) == 0
            && self.residency.pages(block).next().is_none()
            && self.tree.is_leaf(block)
        {
            let before = self.tree.block_before(block);
            self.drop_snapshot_of(block);
            self.tree.remove_from(block, &mut self.removed.from_tree);
            self.removed.from_tree.blocks.pop();
            if let Some(watch) = &mut self.watch {
                watch.note_removed(block);
            }
            match before {
                Some(before) => block = before,
                None => return,
            }
        }
    }

    /// Records the last use of a cached page that is not in the eviction list, and adds the page to the list if it can
    /// be evicted.
    pub(super) fn list_used(&mut self, page: PageId, clock: u64) {
        self.residency.note_used(page, clock);
        self.note_leaf(page);
    }

    /// Removes a page from the eviction list, if present.
    pub(super) fn unlist(&mut self, page: PageId) {
        if let Some(resident) = self.residency.resident(page) {
            self.take_off_list(resident.last_used(), page);
        }
    }

    /// Removes a page with this last use from the eviction list of its kind, if present.
    fn take_off_list(&mut self, last_used: u64, page: PageId) {
        if !self.retained.unlist(page) {
            self.evictable.remove(&(last_used, page));
        }
    }

    /// Whether a page, if cached, can be evicted.
    pub(super) fn is_leaf(&self, resident: Resident) -> bool {
        self.residency.has_window(resident) || self.tree.is_leaf(resident.block)
    }

    pub(super) fn note_leaf(&mut self, page: PageId) {
        if let Some(resident) = self.residency.resident(page)
            && !self.is_locked(page)
            && self.is_leaf(resident)
            && !self.retained.list(page)
        {
            self.evictable.insert((resident.last_used(), page));
        }
    }

    /// Adds the pages of a block that has become a leaf to the eviction list.
    fn note_block(&mut self, block: BlockId) {
        for group in 0..self.residency.groups().len() {
            if let Some(page) = self.residency.page(block, group) {
                self.note_leaf(page);
            }
        }
        self.prune(block);
    }
}
