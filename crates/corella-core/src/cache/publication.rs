//! Publication: how the blocks that a request computes come into the prefix tree, and go when their rows turn
//! out to be undefined.
//!
//! The blocks that a request has found or published are its path. In groups without a window it holds a
//! lock on all their pages, so they stay. Where the tree already has the next block with another request's
//! pages, the path ends until the request lets go of its own pages, and it is a *guest* of the blocks that
//! follow: it gives them the pages that windows have left them without.

use alloc::collections::BTreeSet;

use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::Parent;
use crate::request_state::{RequestIndex, RequestState};
use crate::{BlockId, PageId, Scheduler, StepId};

/// How far a request goes on behind its path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guest {
    /// The last block to which it has offered its pages, and the number of the block's insertion, without
    /// which it is another block.
    block: BlockId,
    insertion: u64,
    /// The number of blocks up to the end of that one.
    num_blocks: u32,
}

/// Published blocks whose rows turned out to be undefined.
pub(crate) struct Undefined {
    /// Indexed by page.
    is_undefined: alloc::vec::Vec<bool>,
    /// Requests whose path led through such a block. They may have read pages that they have given back
    /// since.
    requests: BTreeSet<RequestIndex>,
}

impl Undefined {
    pub fn new(num_pages: u32) -> Self {
        Self {
            is_undefined: alloc::vec![false; num_pages as usize],
            requests: BTreeSet::new(),
        }
    }

    fn contains(&self, page: PageId) -> bool {
        self.is_undefined[page.0 as usize]
    }
}

impl RequestState {
    /// The last block of its path or, where it is a guest, the last to which it has offered its pages, and
    /// the number of blocks up to there.
    pub fn offered(&self) -> (Option<BlockId>, u32) {
        match &self.guest {
            Some(guest) => (Some(guest.block), guest.num_blocks),
            None => (self.path_end, self.num_published_blocks),
        }
    }

    fn parent(&self) -> Parent<'_> {
        match self.path_end {
            Some(end) => Parent::Block(end),
            None => Parent::Root(&self.request.namespace),
        }
    }
}

fn page_at(tables: &PageTables, at: usize) -> impl Fn(usize) -> Option<PageId> {
    move |group| tables.group(group).page(at)
}

impl Scheduler {
    /// Publishes the request's whole blocks of known tokens in the prefix tree. They are pending until
    /// `step` has returned. Followers that find all that they wait for go back into the queue.
    pub(crate) fn publish_filled(&mut self, index: RequestIndex, step: StepId) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let state = &self.requests[index];
        let num_rows = state.num_scheduled_tokens.min(state.num_known_tokens());
        let num_blocks = num_rows / self.config.page_size;
        let goes_on = self.publish_path(index, num_blocks, step)
            || self.offer_as_guest(index, num_blocks, step);
        let state = &self.requests[index];
        let num_blocks = match goes_on && state.is_prefilling() {
            true => state.offered().1,
            // Followers will find the other request's blocks.
            false => u32::MAX,
        };
        self.let_go_of_followers(index, num_blocks);
    }

    /// Leads a request's path on to `num_blocks` blocks. Returns false where the tree has another request's
    /// block.
    fn publish_path(&mut self, index: RequestIndex, num_blocks: u32, step: StepId) -> bool {
        let page_size = self.config.page_size as usize;
        let state = &mut self.requests[index];
        let before = state.path_end;
        let first = state.num_published_blocks;
        let num_new = num_blocks.saturating_sub(first) as usize;
        if num_new == 0 || !self.kv.make_room_for_blocks(num_new) {
            return true;
        }
        let mut is_whole = true;
        for at in first as usize..num_blocks as usize {
            let tokens = &state.tokens[at * page_size..(at + 1) * page_size];
            let page = page_at(&state.tables, at);
            let Ok(block) = self.kv.publish(state.parent(), tokens, page, step) else {
                is_whole = false;
                break;
            };
            state.path_end = Some(block);
            state.num_published_blocks += 1;
        }
        if before != state.path_end {
            self.kv.move_end(before, state.path_end);
            state.guest = None;
        }
        is_whole
    }

    /// Offers a request's pages to blocks behind its path, up to `num_blocks` blocks. Returns false where
    /// there is no such block, or when no block can lack a page.
    fn offer_as_guest(&mut self, index: RequestIndex, num_blocks: u32, step: StepId) -> bool {
        if !self.kv.has_windows() {
            return false;
        }
        let page_size = self.config.page_size as usize;
        let state = &mut self.requests[index];
        let is_there = |guest: &Guest| self.kv.insertion(guest.block) == Some(guest.insertion);
        state.guest = state.guest.filter(is_there);
        for at in state.offered().1 as usize..num_blocks as usize {
            let parent = match &state.guest {
                Some(guest) => Parent::Block(guest.block),
                None => state.parent(),
            };
            let tokens = &state.tokens[at * page_size..(at + 1) * page_size];
            let Some(block) = self.kv.child(parent, tokens) else {
                return false;
            };
            self.kv.fill_block(block, page_at(&state.tables, at), step);
            state.guest = { self.kv.insertion(block) }.map(|insertion| Guest {
                block,
                insertion,
                num_blocks: at as u32 + 1,
            });
        }
        true
    }

    /// Publishes the rest of a request's computed rows before it lets go of its pages: blocks
    /// behind one that the tree already has, and the filled rows of the last page. If its pages stay
    /// locked, none are published behind such a block, whose pages may be without a lock.
    pub(crate) fn publish_computed(&mut self, index: RequestIndex) {
        let Some(last_returned) = self.last_returned() else {
            return;
        };
        if !self.config.enable_prefix_caching {
            return;
        }
        let state = &self.requests[index];
        let num_rows = state.num_computed_tokens as usize;
        let page_size = self.config.page_size as usize;
        let stays_locked = state.num_spill_pages + state.num_exporting_pages > 0;
        let blocks = state.num_published_blocks as usize..num_rows.div_ceil(page_size);
        if !self.kv.make_room_for_blocks(blocks.len()) {
            return;
        }
        let mut parent = state.parent();
        for at in blocks {
            let tokens = &state.tokens[at * page_size..num_rows.min((at + 1) * page_size)];
            let page = page_at(&state.tables, at);
            let published = self.kv.publish(parent, tokens, page, last_returned);
            if published.is_err() && stays_locked {
                return;
            }
            parent = Parent::Block(published.unwrap_or_else(|there| there));
        }
    }

    /// Sets the path of a request to `num_blocks` blocks that were found, up to `end`.
    pub(crate) fn begin_path(
        &mut self,
        index: RequestIndex,
        end: Option<BlockId>,
        num_blocks: u32,
    ) {
        let state = &mut self.requests[index];
        self.kv.move_end(state.path_end, end);
        state.path_end = end;
        state.num_published_blocks = num_blocks;
        state.guest = None;
    }

    /// Ends the path of a request that has let go of its pages.
    pub(crate) fn leave_path(&mut self, index: RequestIndex) {
        self.begin_path(index, None, 0);
    }

    /// Takes the blocks that `step` or a later one fills, and all blocks behind them, out of the prefix
    /// tree, and sets the request back to the position before them. Behind its path, that may be another
    /// request's blocks to which it has given pages.
    pub(crate) fn unpublish_undefined(
        &mut self,
        index: RequestIndex,
        step: StepId,
        undefined: &mut Undefined,
    ) {
        let state = &self.requests[index];
        let num_computed = state.num_computed_tokens.max(state.num_scheduled_tokens);
        let tokens = &state.tokens[..state.num_known_tokens().min(num_computed) as usize];
        let matched = self.kv.match_prefix(&state.request.namespace, tokens);
        let num_blocks = match self.kv.has_windows() {
            true => matched.blocks.len(),
            false => state.num_published_blocks as usize,
        };
        let mut path = matched.blocks.into_iter().take(num_blocks);
        let is_undefined = |&block: &BlockId| self.kv.block_filled_by(block) >= Some(step);
        if let Some(first) = path.find(is_undefined) {
            self.unpublish_from(first, undefined);
        }
        let state = &mut self.requests[index];
        let num_rows = state.num_published_blocks * self.config.page_size;
        state.num_computed_tokens = state.num_computed_tokens.min(num_rows);
    }

    /// Unpublishes a block and all behind it, and ends before it every path that leads through it.
    fn unpublish_from(&mut self, first: BlockId, undefined: &mut Undefined) {
        let before = self.kv.block_before(first);
        // It stays, even if it has no page, until the paths have been set back to it.
        self.kv.move_end(None, before);
        let removed = self.kv.unpublish(first);
        let num_blocks = self.kv.path_len(before) as u32;
        for page in removed.pages {
            undefined.is_undefined[page.0 as usize] = true;
        }
        let removed: BTreeSet<_> = removed.blocks.into_iter().collect();
        let indices: alloc::vec::Vec<_> = self.requests.indices().collect();
        for index in indices {
            let state = &mut self.requests[index];
            if state.path_end.is_some_and(|end| removed.contains(&end)) {
                undefined.requests.insert(index);
                state.path_end = None;
                self.begin_path(index, before, num_blocks);
            }
        }
        self.kv.move_end(before, None);
    }

    /// Whether a request has read something undefined.
    pub(crate) fn reads_any(&self, index: RequestIndex, undefined: &Undefined) -> bool {
        let state = &self.requests[index];
        let spilled = self.spills.source(state.request.id).iter().copied();
        let mut read = state
            .tables
            .pages()
            .chain(state.donor_pages())
            .chain(spilled);
        undefined.requests.contains(&index) || read.any(|page| undefined.contains(page))
    }
}
