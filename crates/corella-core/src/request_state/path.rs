//! The path of a request: the blocks that it has found in the prefix tree or published there.
//!
//! In groups without a window, the request locks all pages of these blocks, so the blocks stay. If the tree already has
//! the next block with another request's pages, the path ends until the request gives up its own pages. The request is
//! then a *guest* of the following blocks: it gives these blocks the pages that they lack in groups with windows.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::Parent;
use crate::request_state::{HeldSnapshot, RequestState};
use crate::{BlockId, Namespace, PageId, StepId};

#[derive(Debug, Default)]
pub(super) struct Path {
    /// The number of the path's blocks. In groups without a window, their pages are the first pages of the request's
    /// tables.
    num_blocks: u32,
    /// The last block of the path.
    end: Option<BlockId>,
    /// The blocks of other requests after the path.
    guest: Option<Box<Guest>>,
}

/// The blocks after a request's path to which it has offered pages.
#[derive(Clone, Copy, Debug)]
struct Guest {
    /// The last block to which the request has offered its pages, and the number of the block's insertion, which
    /// differs for later uses of the block id.
    block: BlockId,
    insertion: u64,
    /// The number of blocks up to the end of `block`.
    num_blocks: u32,
    /// The block after `block` was missing. The request publishes the missing block when it gives up its pages.
    is_at_end: bool,
}

/// Blocks to which a request has given pages since some step.
#[derive(Default)]
pub(crate) struct FilledBlocks {
    /// Blocks that were in the tree before, most of them of other requests. They lacked the given pages in groups with
    /// windows, or a snapshot.
    pub earlier: Vec<BlockId>,
    /// The first new block. All blocks after it are new.
    pub first_new: Option<BlockId>,
}

impl Path {
    fn parent<'a>(&self, namespace: &'a Namespace) -> Parent<'a> {
        match self.end {
            Some(end) => Parent::Block(end),
            None => Parent::Root(namespace),
        }
    }

    /// The last block of the path or, for a guest, the last block to which it has offered its pages, and the number of
    /// blocks up to there.
    fn offered(&self) -> (Option<BlockId>, u32) {
        match &self.guest {
            Some(guest) => (Some(guest.block), guest.num_blocks),
            None => (self.end, self.num_blocks),
        }
    }
}

fn page_at(tables: &PageTables, at: usize) -> impl Fn(usize) -> Option<PageId> {
    move |group| tables.group(group).page(at)
}

impl RequestState {
    pub fn path_end(&self) -> Option<BlockId> {
        self.path.end
    }

    pub fn num_published_blocks(&self) -> u32 {
        self.path.num_blocks
    }

    /// The number of blocks up to the last block to which the request has offered its pages.
    pub fn num_offered_blocks(&self) -> u32 {
        self.path.offered().1
    }

    /// The block after which the request publishes its next block, and the number of blocks up to there.
    pub fn frontier(&self) -> Option<(Option<BlockId>, u32)> {
        let guest = self.path.guest.as_ref();
        let goes_on = guest.is_none_or(|guest| !guest.is_at_end);
        goes_on.then(|| self.path.offered())
    }

    /// Sets the path to the `num_blocks` found blocks up to `end`.
    pub fn begin_path(&mut self, kv: &mut KvCache, end: Option<BlockId>, num_blocks: u32) {
        kv.move_end(self.path.end, end);
        self.path = Path {
            num_blocks,
            end,
            guest: None,
        };
    }

    /// Ends the path of a request that has given up its pages.
    pub fn leave_path(&mut self, kv: &mut KvCache) {
        self.begin_path(kv, None, 0);
    }

    /// If the path leads through removed blocks, cuts it back before them. Returns whether it did.
    pub fn set_back_path(
        &mut self,
        kv: &mut KvCache,
        end: Option<BlockId>,
        num_blocks: u32,
    ) -> bool {
        let is_removed = |&block: &BlockId| kv.insertion(block).is_none();
        if !self.path.end.as_ref().is_some_and(is_removed) {
            return false;
        }
        self.path.end = None;
        self.begin_path(kv, end, num_blocks);
        true
    }

    /// Extends the path to `num_blocks` blocks. Stops and returns false where the tree already has another request's
    /// block.
    pub fn publish_path(&mut self, kv: &mut KvCache, num_blocks: u32, step: StepId) -> bool {
        let page_size = kv.page_size() as usize;
        let before = self.path.end;
        let first = self.path.num_blocks;
        let num_new = num_blocks.saturating_sub(first) as usize;
        if num_new == 0 || !kv.make_room_for_blocks(num_new) {
            return true;
        }
        let mut is_whole = true;
        for at in first as usize..num_blocks as usize {
            let tokens = &self.progress.tokens()[at * page_size..(at + 1) * page_size];
            let page = page_at(self.allocation.tables(), at);
            let parent = self.path.parent(&self.request.namespace);
            let block = match kv.publish(parent, tokens, &page, step) {
                Ok(block) => block,
                Err(there) if kv.take_over(there, &page, step) => there,
                Err(_) => {
                    is_whole = false;
                    break;
                }
            };
            self.path.end = Some(block);
            self.path.num_blocks += 1;
        }
        if before != self.path.end {
            kv.move_end(before, self.path.end);
            self.path.guest = None;
        }
        is_whole
    }

    /// Offers the request's pages to blocks after its path, up to `num_blocks` blocks. Stops and returns false where
    /// such a block is missing. Also returns false if the model has neither windows nor recurrent layers, so that no
    /// block lacks anything.
    pub fn offer_as_guest(&mut self, kv: &mut KvCache, num_blocks: u32, step: StepId) -> bool {
        if !kv.has_windows() && !kv.is_recurrent() {
            return false;
        }
        let page_size = kv.page_size() as usize;
        let path = &mut self.path;
        let is_gone = |guest: &mut Box<Guest>| kv.insertion(guest.block) != Some(guest.insertion);
        path.guest.take_if(is_gone);
        for at in path.offered().1 as usize..num_blocks as usize {
            let parent = match &path.guest {
                Some(guest) => Parent::Block(guest.block),
                None => path.parent(&self.request.namespace),
            };
            let tokens = &self.progress.tokens()[at * page_size..(at + 1) * page_size];
            let Some(block) = kv.child(parent, tokens) else {
                if let Some(guest) = &mut path.guest {
                    guest.is_at_end = true;
                }
                return false;
            };
            kv.fill_block(block, page_at(self.allocation.tables(), at), step);
            let insertion = kv.insertion(block);
            path.guest = insertion.map(|insertion| {
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

    /// The last of the request's first `num_blocks` blocks, if it is on the path or among the blocks to which the
    /// request has offered its pages.
    pub fn block_at(&self, kv: &KvCache, num_blocks: u32) -> Option<BlockId> {
        let guest = self.path.guest.as_ref();
        if guest.is_some_and(|guest| kv.insertion(guest.block) != Some(guest.insertion)) {
            return None;
        }
        let (end, num_offered) = self.path.offered();
        let mut block = end?;
        for _ in 0..num_offered.checked_sub(num_blocks)? {
            block = kv.block_before(block)?;
        }
        Some(block)
    }

    /// Gives the request's snapshot to the snapshot's block, once the prefix tree has the block.
    pub fn give_snapshot(&mut self, kv: &mut KvCache) {
        if let Some(HeldSnapshot { id, num_blocks }) = self.snapshot()
            && let Some(block) = self.block_at(kv, num_blocks)
        {
            kv.give_snapshot(id, block);
            self.take_snapshot();
        }
    }

    /// Gives up the request's snapshot. The snapshot's block gets it if the prefix tree has the block and its rows are
    /// computed.
    pub fn leave_snapshot(&mut self, kv: &mut KvCache) {
        let Some(HeldSnapshot { id, num_blocks }) = self.take_snapshot() else {
            return;
        };
        let num_rows = num_blocks * kv.page_size();
        let is_computed = num_rows <= self.num_computed_tokens().min(self.num_known_tokens());
        let mut blocks = Vec::new();
        if is_computed {
            let tokens = &self.progress.tokens()[..num_rows as usize];
            blocks = kv.match_prefix(&self.request.namespace, tokens).blocks;
        }
        match blocks.last() {
            Some(&block) if blocks.len() == num_blocks as usize => kv.give_snapshot(id, block),
            _ => kv.drop_snapshot(id),
        }
    }

    /// Publishes the rest of the computed rows before the request gives up its pages: the blocks after a block that the
    /// tree already has, and the filled rows of the last page. If the request's pages stay locked, nothing is published
    /// after a block that the tree already has: the pages of that block may be unlocked, and the page before a locked
    /// page must be locked.
    pub fn publish_computed(&self, kv: &mut KvCache, last_returned: StepId) {
        let num_rows = self.num_computed_tokens().min(self.num_publishable_rows()) as usize;
        let page_size = kv.page_size() as usize;
        let stays_locked = self.num_spill_pages() + self.export().num_pages() > 0;
        // With recurrent layers, no request can continue within a block, because it would lack the state there.
        let num_blocks = match kv.is_recurrent() {
            true => num_rows / page_size,
            false => num_rows.div_ceil(page_size),
        };
        let blocks = self.path.num_blocks as usize..num_blocks;
        if !kv.make_room_for_blocks(blocks.len()) {
            return;
        }
        let mut parent = self.path.parent(&self.request.namespace);
        for at in blocks {
            let tokens =
                &self.progress.tokens()[at * page_size..num_rows.min((at + 1) * page_size)];
            let page = page_at(self.allocation.tables(), at);
            let published = kv.publish(parent, tokens, page, last_returned);
            if published.is_err() && stays_locked {
                return;
            }
            parent = Parent::Block(published.unwrap_or_else(|there| there));
        }
        // With windows in all groups, the last blocks may have no page.
        if let Parent::Block(last) = parent {
            kv.prune(last);
        }
    }

    /// The blocks to which the request has given pages that `step` or a later step fills.
    pub fn filled_since(&self, kv: &KvCache, step: StepId) -> FilledBlocks {
        let mut filled = FilledBlocks::default();
        if !kv.has_windows() {
            let pages = self.tables().group(0).pages.iter();
            let mut published = pages.take(self.path.num_blocks as usize);
            let first = published.find(|&&page| kv.filled_by(page) >= Some(step));
            filled.first_new = first.and_then(|&page| kv.block_of(page));
            if kv.is_recurrent() {
                let blocks = self.offered_blocks(kv).into_iter();
                let before = blocks.take_while(|&block| Some(block) != filled.first_new);
                filled.earlier = before
                    .filter(|&block| kv.snapshot_filled_by(block) >= Some(step))
                    .collect();
            }
            return filled;
        }
        for block in self.offered_blocks(kv) {
            if kv.is_new_since(block, step) {
                filled.first_new = Some(block);
                break;
            }
            let filled_by = kv.block_filled_by(block).max(kv.snapshot_filled_by(block));
            if filled_by >= Some(step) {
                filled.earlier.push(block);
            }
        }
        filled
    }

    /// Whether the request's tokens lead through any of these blocks, so that it may have read their rows.
    pub fn leads_through(&self, kv: &KvCache, blocks: &BTreeSet<BlockId>) -> bool {
        if blocks.is_empty() {
            return false;
        }
        let path = self.offered_blocks(kv);
        path.iter().any(|block| blocks.contains(block))
    }

    /// The blocks of the request's tokens to which it may have given pages.
    fn offered_blocks(&self, kv: &KvCache) -> Vec<BlockId> {
        let num_computed = self.num_computed_tokens().max(self.num_scheduled_tokens());
        let tokens = &self.progress.tokens()[..self.num_known_tokens().min(num_computed) as usize];
        kv.match_prefix(&self.request.namespace, tokens).blocks
    }
}
