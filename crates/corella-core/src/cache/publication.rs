//! Publication: how the blocks that a request computes come into the prefix tree, and go when their rows turn
//! out to be undefined.
//!
//! The blocks that a request has found or published are its path. In groups without a window it holds a
//! lock on all their pages, so they stay. Where the tree already has the next block with another request's
//! pages, the path ends until the request lets go of its own pages, and it is a *guest* of the blocks that
//! follow: it gives them the pages that windows have left them without.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

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
    /// The block behind it was not there. The request publishes it when it lets go of its pages.
    is_at_end: bool,
}

/// Published blocks whose rows turned out to be undefined.
pub(crate) struct Undefined {
    /// Indexed by page.
    is_undefined: Vec<bool>,
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
    fn offered(&self) -> (Option<BlockId>, u32) {
        match &self.guest {
            Some(guest) => (Some(guest.block), guest.num_blocks),
            None => (self.path_end, self.num_published_blocks),
        }
    }

    /// The block behind which it is going to publish the next, and the number of blocks up to there.
    pub fn frontier(&self) -> Option<(Option<BlockId>, u32)> {
        let goes_on = { self.guest.as_ref() }.is_none_or(|guest| !guest.is_at_end);
        goes_on.then(|| self.offered())
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
        let is_gone =
            |guest: &mut Box<Guest>| self.kv.insertion(guest.block) != Some(guest.insertion);
        state.guest.take_if(is_gone);
        for at in state.offered().1 as usize..num_blocks as usize {
            let parent = match &state.guest {
                Some(guest) => Parent::Block(guest.block),
                None => state.parent(),
            };
            let tokens = &state.tokens[at * page_size..(at + 1) * page_size];
            let Some(block) = self.kv.child(parent, tokens) else {
                if let Some(guest) = &mut state.guest {
                    guest.is_at_end = true;
                }
                return false;
            };
            self.kv.fill_block(block, page_at(&state.tables, at), step);
            let insertion = self.kv.insertion(block);
            state.guest = insertion.map(|insertion| {
                let num_blocks = at as u32 + 1;
                Box::new(Guest {
                    block,
                    insertion,
                    num_blocks,
                    is_at_end: false,
                })
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
        // Behind all windows, the last blocks may have got no page.
        if let Parent::Block(last) = parent {
            self.kv.prune(last);
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
        let first = match self.kv.has_windows() {
            true => {
                let is_undefined = |block: &BlockId| self.kv.block_filled_by(*block) >= Some(step);
                self.offered_blocks(index).into_iter().find(is_undefined)
            }
            false => {
                let state = &self.requests[index];
                let pages = state.tables.group(0).pages.iter();
                let mut published = pages.take(state.num_published_blocks as usize);
                let first = published.find(|&&page| self.kv.filled_by(page) >= Some(step));
                first.and_then(|&page| self.kv.block_of(page))
            }
        };
        if let Some(first) = first {
            self.unpublish_from(first, index, undefined);
        }
        let state = &mut self.requests[index];
        let num_rows = state.num_published_blocks * self.config.page_size;
        state.num_computed_tokens = state.num_computed_tokens.min(num_rows);
    }

    /// The blocks of a request's tokens, as far as it may have given them pages.
    fn offered_blocks(&self, index: RequestIndex) -> Vec<BlockId> {
        let state = &self.requests[index];
        let num_computed = state.num_computed_tokens.max(state.num_scheduled_tokens);
        let tokens = &state.tokens[..state.num_known_tokens().min(num_computed) as usize];
        self.kv
            .match_prefix(&state.request.namespace, tokens)
            .blocks
    }

    /// Unpublishes a block of a request and all behind it, and ends before it every path that leads through
    /// it.
    fn unpublish_from(&mut self, first: BlockId, index: RequestIndex, undefined: &mut Undefined) {
        let before = self.kv.block_before(first);
        // It stays, even if it has no page, until the paths have been set back to it.
        self.kv.move_end(None, before);
        let removed = self.kv.unpublish(first);
        let num_blocks = self.kv.path_len(before) as u32;
        for page in removed.pages {
            undefined.is_undefined[page.0 as usize] = true;
        }
        let mut num_left = removed.num_ends;
        let mut set_back = |scheduler: &mut Self, index| {
            let state = &mut scheduler.requests[index];
            let is_removed = |&end: &BlockId| scheduler.kv.insertion(end).is_none();
            if state.path_end.as_ref().is_some_and(is_removed) {
                undefined.requests.insert(index);
                state.path_end = None;
                scheduler.begin_path(index, before, num_blocks);
                num_left -= 1;
            }
            num_left > 0
        };
        if set_back(self, index) {
            for index in self.requests.indices().collect::<Vec<_>>() {
                set_back(self, index);
            }
        }
        self.kv.move_end(before, None);
    }

    /// Whether a request has read something undefined.
    pub(crate) fn reads_any(&self, index: RequestIndex, undefined: &Undefined) -> bool {
        let state = &self.requests[index];
        let spilled = self.spills.source(state.request.id);
        let mut read = state
            .tables
            .pages()
            .chain(state.donor_pages())
            .chain(spilled);
        undefined.requests.contains(&index) || read.any(|page| undefined.contains(page))
    }
}
