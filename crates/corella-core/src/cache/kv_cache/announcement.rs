//! Selects the blocks for KV events. A hit can end at a block if every group has all pages that the next query reads
//! and, in a model with recurrent layers, if the block has a snapshot. A page lost in a group with a window rules out
//! hits that end at its block, or at a later block after which a query would read the page.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::kv_event::{KvEvent, KvWatch};
use crate::{BlockId, StepId};

impl KvCache {
    /// Starts a subscription to the blocks that can be hit, beginning with the blocks that are in the tree now.
    pub fn watch(&mut self, salt: u64) {
        let blocks = self.tree.whole_blocks();
        self.watch = Some(Box::new(KvWatch::new(salt, blocks.len())));
        for block in blocks {
            let filled_by = self.residency.filled_by_without_window(block);
            self.watch_block(block, filled_by);
            self.announce(block);
        }
    }

    pub fn unwatch(&mut self) {
        self.watch = None;
    }

    /// The next event for the subscriber. `last_returned` is the newest step whose rows are computed.
    pub fn poll_event(&mut self, last_returned: Option<StepId>) -> Option<KvEvent> {
        let watch = self.watch.as_mut()?;
        if let Some(event) = watch.pop_gone() {
            return Some(event);
        }
        let block = watch.pop_ready(last_returned)?;
        let before = self.tree.block_before(block);
        Some(KvEvent::Stored {
            page: watch.hash(block)?,
            parent: before.and_then(|before| watch.hash(before)),
            tokens: self.tree.block_tokens(block).into(),
            namespace: self.tree.namespace(block).cloned()?,
        })
    }

    /// Watches a new block of the tree. Leaves out tails, and blocks of another node's arithmetic, which no client's
    /// request can hit.
    pub(super) fn watch_block(&mut self, block: BlockId, filled_by: StepId) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let tokens = self.tree.block_tokens(block);
        let is_whole = tokens.len() == self.tree.page_size();
        if let Some(parent) = self.tree.parent(block).filter(|_| is_whole)
            && watch.covers(parent)
        {
            let filled_by = match self.residency.fills_all_blocks() {
                true => filled_by,
                false => StepId(0),
            };
            watch.note_entered(parent, tokens, block, filled_by);
        }
    }

    /// Announces a block if a prefix can be hit up to its end.
    pub(super) fn announce(&mut self, block: BlockId) {
        if self.watch.is_none() || self.tree.block_tokens(block).len() < self.tree.page_size() {
            return;
        }
        let ready_by = self.hit_filled_by(block);
        if let (Some(watch), Some(ready_by)) = (&mut self.watch, ready_by) {
            watch.note_found(block, ready_by);
        }
    }

    /// Announces the blocks at which a hit can end now that `block` has its page in a group.
    pub(super) fn announce_behind(&mut self, block: BlockId, group: usize) {
        for block in self.readers(block, group) {
            self.announce(block);
        }
    }

    /// Retracts the blocks at which no hit can end now that `block` has lost its page in a group.
    pub(super) fn retract_behind(&mut self, block: BlockId, group: usize) {
        if self.watch.is_none() {
            return;
        }
        let readers = self.readers(block, group);
        if let Some(watch) = &mut self.watch {
            for block in readers {
                watch.note_lost(block);
            }
        }
    }

    /// The blocks after which a query reads the page of `block` in a group with a window.
    fn readers(&self, block: BlockId, group: usize) -> Vec<BlockId> {
        let mut readers = Vec::new();
        if self.residency.groups()[group].window.is_none() {
            return readers;
        }
        let first = self.tree.depth(block);
        let mut open = alloc::vec![(block, first)];
        while let Some((block, depth)) = open.pop() {
            if self.first_read_behind(depth, group) <= first {
                readers.push(block);
                let children = self.tree.children(block);
                open.extend(children.map(|child| (child, depth + 1)));
            }
        }
        readers
    }

    /// The first block that a query after the block at `depth` reads in a group.
    fn first_read_behind(&self, depth: usize, group: usize) -> usize {
        let num_rows = (depth as u32 + 1) * self.page_size();
        let group = self.residency.groups()[group];
        group.first_page_read(num_rows, self.page_size()) as usize
    }

    /// The step whose return makes ready all that a hit at the block's end needs: the block's snapshot, and the pages
    /// in groups with windows that the next query reads. Pages in groups without a window do not count here. `None` if
    /// the snapshot or one of the pages is missing.
    fn hit_filled_by(&self, block: BlockId) -> Option<StepId> {
        let mut ready_by = match self.is_recurrent() {
            true => self.snapshot_filled_by(block)?,
            false => StepId(0),
        };
        if !self.residency.has_windows() {
            return Some(ready_by);
        }
        let depth = self.tree.depth(block);
        for (index, group) in self.residency.groups().iter().enumerate() {
            let first = self.first_read_behind(depth, index);
            let mut block = Some(block).filter(|_| group.window.is_some());
            for _ in first..=depth {
                let Some(read) = block else { break };
                let page = self.residency.page(read, index)?;
                ready_by = ready_by.max(self.filled_by(page)?);
                block = self.tree.block_before(read);
            }
        }
        Some(ready_by)
    }

    pub(super) fn check_watch(&self) {
        let Some(watch) = &self.watch else {
            return;
        };
        let mut blocks = self.tree.whole_blocks();
        blocks.retain(|&block| {
            let namespace = self.tree.namespace(block);
            namespace.is_some_and(|namespace| namespace.arithmetic.is_none())
        });
        assert_eq!(
            watch.num_blocks(),
            blocks.len(),
            "a block that is not whole, not in the tree, or of another arithmetic has a hash"
        );
        for block in blocks {
            let before = self.tree.block_before(block);
            let is_in_order = before.is_none_or(|before| watch.is_told(before));
            assert!(
                is_in_order
                    || !watch.is_told(block)
                    || self.residency.has_windows()
                    || self.is_recurrent(),
                "block {block} was announced before the block that it follows"
            );
            let parent = self.tree.parent(block);
            let tokens = self.tree.block_tokens(block);
            let expected = parent.map(|parent| watch.hash_after(parent, tokens));
            assert_eq!(
                watch.hash(block),
                expected,
                "the hash of block {block} is wrong"
            );
            assert_eq!(
                watch.is_found(block),
                self.hit_filled_by(block).is_some(),
                "block {block} is announced and cannot be hit, or the reverse"
            );
        }
    }
}
