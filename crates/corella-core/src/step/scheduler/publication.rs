//! Publication: computed blocks enter the prefix tree, and leave it when their rows prove void.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::request_state::{Leader, RequestIndex, RequestSet};
use crate::{BlockId, PageId, Scheduler, StepId};

/// Published blocks whose rows have proved void.
pub(super) struct Undefined {
    /// Indexed by page.
    is_undefined: Vec<bool>,
    /// Requests whose path led through such a block. They may have read pages that they have given back since.
    requests: RequestSet,
    /// Blocks that have lost void pages and stay in the tree. A request whose path leads through such a block may have
    /// read a void page and given it back, too.
    blocks: BTreeSet<BlockId>,
    /// Blocks that have lost their snapshots.
    states: BTreeSet<BlockId>,
}

impl Undefined {
    pub fn new(num_pages: u32) -> Self {
        Self {
            is_undefined: alloc::vec![false; num_pages as usize],
            requests: RequestSet::default(),
            blocks: BTreeSet::new(),
            states: BTreeSet::new(),
        }
    }

    fn contains(&self, page: PageId) -> bool {
        self.is_undefined[page.0 as usize]
    }
}

impl Scheduler {
    /// Publishes the request's whole blocks of known tokens in the prefix tree. They are pending until
    /// `step` has returned.
    pub(super) fn publish_filled(&mut self, index: RequestIndex, step: StepId) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let state = &self.requests[index];
        let num_rows = state
            .num_scheduled_tokens()
            .min(state.num_known_tokens())
            .min(state.num_publishable_rows());
        let end_of_next = (state.num_published_blocks() + 1) * self.config.page_size;
        // Most spans of decodes end within a block, and publish no block.
        if num_rows >= end_of_next || state.snapshot().is_some() || self.waiting.has_followers() {
            let num_blocks = num_rows / self.config.page_size;
            self.publish_blocks(index, num_blocks, step);
        }
    }

    /// Publishes a request's first `num_blocks` blocks, and requeues followers whose prefix is now published.
    fn publish_blocks(&mut self, index: RequestIndex, num_blocks: u32, step: StepId) {
        let state = &mut self.requests[index];
        let kv = &mut self.kv;
        let goes_on =
            state.publish_path(kv, num_blocks, step) || state.offer_as_guest(kv, num_blocks, step);
        state.give_snapshot(kv);
        let num_blocks = match goes_on && state.is_prefilling() {
            true => state.num_offered_blocks(),
            // The prompt is scheduled to its end, or another request publishes its blocks: no follower needs to wait.
            false => u32::MAX,
        };
        let requests = &mut self.requests;
        self.waiting
            .let_go_of_followers(Leader::Request(index), num_blocks, requests);
    }

    /// Removes from the prefix tree the blocks that `step` or a later step publishes, and all blocks after them. Cuts
    /// the request's path back before the removed blocks. Earlier blocks, which may be pinned, only lose the pages that
    /// such a step fills.
    pub(super) fn unpublish_undefined(
        &mut self,
        index: RequestIndex,
        step: StepId,
        undefined: &mut Undefined,
    ) {
        let filled = self.requests[index].filled_since(&self.kv, step);
        if let Some(held) = self.requests[index].take_snapshot() {
            self.kv.drop_snapshot(held.id);
        }
        for &block in &filled.earlier {
            self.drop_filled_since(block, step, undefined);
        }
        if let Some(first) = filled.first_new {
            self.unpublish_from(first, index, undefined);
        }
        if let Some(&first) = filled.earlier.first() {
            self.unpublish_behind(first, step, index, undefined);
        }
        if let Some(&last) = filled.earlier.last() {
            self.kv.prune(last);
        }
        let state = &mut self.requests[index];
        let num_rows = state.num_published_blocks() * self.config.page_size;
        state.truncate_computed(num_rows);
    }

    /// Unpublishes the blocks behind `block` that `step` or a later step fills. They may come from another request,
    /// which continued from the snapshot of `block` and has given its pages back since.
    fn unpublish_behind(
        &mut self,
        block: BlockId,
        step: StepId,
        index: RequestIndex,
        undefined: &mut Undefined,
    ) {
        if !self.kv.is_recurrent() {
            return;
        }
        let mut kept = alloc::vec![block];
        let mut at = 0;
        while let Some(&block) = kept.get(at) {
            at += 1;
            for child in self.kv.children(block) {
                if self.kv.is_new_since(child, step) {
                    self.unpublish_from(child, index, undefined);
                } else {
                    self.drop_filled_since(child, step, undefined);
                    kept.push(child);
                }
            }
        }
        // A block is pruned after the blocks that follow it.
        for &block in kept[1..].iter().rev() {
            if self.kv.insertion(block).is_some() {
                self.kv.prune(block);
            }
        }
    }

    /// Takes from an earlier block the pages and the snapshot that `step` or a later step has given it.
    fn drop_filled_since(&mut self, block: BlockId, step: StepId, undefined: &mut Undefined) {
        if self.kv.snapshot_filled_by(block) >= Some(step) {
            undefined.states.insert(block);
        }
        for page in self.kv.drop_filled_since(block, step) {
            undefined.is_undefined[page.0 as usize] = true;
            undefined.blocks.insert(block);
        }
    }

    /// Unpublishes a block of a request and all blocks after it, and cuts every path that leads through the block back
    /// before it.
    fn unpublish_from(&mut self, first: BlockId, index: RequestIndex, undefined: &mut Undefined) {
        let before = self.kv.block_before(first);
        // The block `before` stays in the tree, even without a page, until the paths have been cut back to it.
        self.kv.move_end(None, before);
        let removed = self.kv.unpublish(first);
        let num_blocks = self.kv.path_len(before) as u32;
        for page in removed.pages {
            undefined.is_undefined[page.0 as usize] = true;
        }
        let mut num_left = removed.from_tree.num_ends - self.set_back_fetches(before);
        // Mostly, the request's own path is the only one that is cut. If each request of a failed step looked at all
        // requests, the time would be quadratic.
        num_left -= self.set_back(index, before, num_blocks, undefined);
        if num_left > 0 {
            for index in self.requests.indices().collect::<Vec<_>>() {
                num_left -= self.set_back(index, before, num_blocks, undefined);
                if num_left == 0 {
                    break;
                }
            }
        }
        self.kv.move_end(before, None);
    }

    /// Cuts a request's path back to the block `before`, if the path leads through removed blocks. Returns the number
    /// of cut paths, 0 or 1.
    fn set_back(
        &mut self,
        index: RequestIndex,
        before: Option<BlockId>,
        num_blocks: u32,
        undefined: &mut Undefined,
    ) -> u32 {
        let is_set_back = self.requests[index].set_back_path(&mut self.kv, before, num_blocks);
        if is_set_back {
            undefined.requests.insert(index);
        }
        u32::from(is_set_back)
    }

    /// Ends the holds of blocks that have proved void, so that no load of them completes.
    pub(super) fn end_undefined_holds(&mut self, undefined: &Undefined) {
        let holds = self.holds.of_blocks_mut();
        holds.end_with(|page| undefined.contains(page));
    }

    /// Whether a request has read void rows.
    pub(super) fn reads_any(&self, index: RequestIndex, undefined: &Undefined) -> bool {
        let state = &self.requests[index];
        if undefined.requests.contains(index) {
            return true;
        }
        let is_undefined = |page: &PageId| undefined.contains(*page);
        let restored = state.restored_block();
        let mut tables = state.tables().iter();
        let spilled = self.spills.source(state.id());
        restored.is_some_and(|block| undefined.states.contains(&block))
            || tables.any(|table| table.pages.iter().any(is_undefined))
            || state.donor_pages().any(|page| is_undefined(&page))
            || spilled.into_iter().any(|page| is_undefined(&page))
            || state.leads_through(&self.kv, &undefined.blocks)
    }
}
