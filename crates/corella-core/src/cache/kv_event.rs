//! KV events report the blocks of the prefix cache to a router or another cache tier.

use alloc::boxed::Box;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::cache::page_hash::PageHash;
use crate::{BlockId, Namespace, Parent, StepId, TokenId};

/// A change of the prefix cache. A block counts as stored once all pages that a hit up to its end needs are in the pool
/// and computed. Without windows, each block comes after its parent. With windows, a block may be stored without its
/// parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Forget all earlier events. A subscription starts with this event, and the content of the cache follows.
    Cleared,
    Stored {
        page: PageHash,
        /// The block before this one, or `None` for the first block of a sequence.
        parent: Option<PageHash>,
        tokens: Box<[TokenId]>,
        namespace: Namespace,
    },
    Removed {
        page: PageHash,
    },
}

/// The state of one subscription. Events are made only on request, so a block that enters and leaves the tree between
/// two requests is never mentioned. For a slow reader, at most one `Removed` for each block that it knows and one
/// `Stored` for each block in the tree are pending.
#[derive(Debug, Default)]
pub(crate) struct KvWatch {
    pub salt: u64,
    has_begun: bool,
    /// Whole blocks in the tree, indexed by block.
    blocks: Vec<Option<WatchedBlock>>,
    /// Announced blocks that can no longer be hit, in the order of their loss.
    removed: VecDeque<PageHash>,
    /// Blocks that have not been announced yet, sorted by the step whose return allows the announcement.
    untold: BTreeSet<(StepId, u64, BlockId)>,
    /// Counts the times that a block became available for hits. The count sorts a block after its parent.
    num_found: u64,
}

#[derive(Clone, Copy, Debug)]
struct WatchedBlock {
    hash: PageHash,
    /// The step whose return makes the pages of the block and of its ancestors ready in groups without a window.
    ready_by: StepId,
    /// `None` while a page or snapshot that a hit needs is missing.
    found: Option<Found>,
}

#[derive(Clone, Copy, Debug)]
struct Found {
    /// The step whose return makes all parts of a hit ready.
    ready_by: StepId,
    number: u64,
    is_told: bool,
}

impl KvWatch {
    pub fn new(salt: u64, num_blocks: usize) -> Self {
        Self {
            salt,
            blocks: alloc::vec![None; num_blocks],
            ..Self::default()
        }
    }

    /// Whether blocks after `parent` are announced.
    pub fn covers(&self, parent: Parent) -> bool {
        match parent {
            Parent::Root(namespace) => namespace.arithmetic.is_none(),
            Parent::Block(block) => matches!(self.blocks.get(block.0 as usize), Some(Some(_))),
        }
    }

    /// Records that a whole block has come into the tree. Its parent must have been recorded before it.
    /// `filled_by` makes its pages in groups without a window ready.
    pub fn note_entered(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        block: BlockId,
        filled_by: StepId,
    ) {
        let ready_by = match parent {
            Parent::Root(_) => filled_by,
            Parent::Block(parent) => self.watched(parent).ready_by.max(filled_by),
        };
        let watched = WatchedBlock {
            hash: self.hash_after(parent, tokens),
            ready_by,
            found: None,
        };
        if self.blocks.len() <= block.0 as usize {
            self.blocks.resize(block.0 as usize + 1, None);
        }
        self.blocks[block.0 as usize] = Some(watched);
    }

    /// Records that all pages for a hit up to the end of a block are present. `filled_by` makes its pages in groups
    /// with windows ready.
    pub fn note_found(&mut self, block: BlockId, filled_by: StepId) {
        let number = self.num_found;
        let Some(Some(watched)) = self.blocks.get_mut(block.0 as usize) else {
            return;
        };
        if watched.found.is_some() {
            return;
        }
        let ready_by = watched.ready_by.max(filled_by);
        watched.found = Some(Found {
            ready_by,
            number,
            is_told: false,
        });
        self.num_found += 1;
        self.untold.insert((ready_by, number, block));
    }

    /// Records that a hit up to the end of a block lacks a page or a snapshot.
    pub fn note_lost(&mut self, block: BlockId) {
        let watched = self.blocks.get_mut(block.0 as usize);
        let Some(watched) = watched.and_then(Option::as_mut) else {
            return;
        };
        match watched.found.take() {
            Some(found) if found.is_told => self.removed.push_back(watched.hash),
            Some(found) => {
                self.untold.remove(&(found.ready_by, found.number, block));
            }
            None => {}
        }
    }

    /// Records that a block left the tree. Tails are not watched.
    pub fn note_removed(&mut self, block: BlockId) {
        self.note_lost(block);
        if let Some(watched) = self.blocks.get_mut(block.0 as usize) {
            *watched = None;
        }
    }

    /// The next event that depends on no step: the beginning of the subscription, then lost blocks.
    pub fn pop_gone(&mut self) -> Option<KvEvent> {
        if !core::mem::replace(&mut self.has_begun, true) {
            return Some(KvEvent::Cleared);
        }
        let page = self.removed.pop_front()?;
        Some(KvEvent::Removed { page })
    }

    /// The next block to announce. `last_returned` is the newest step whose rows are computed.
    pub fn pop_ready(&mut self, last_returned: Option<StepId>) -> Option<BlockId> {
        let &(ready_by, _, block) = self.untold.first()?;
        if Some(ready_by) > last_returned {
            return None;
        }
        self.untold.pop_first();
        let watched = self.blocks[block.0 as usize].as_mut();
        if let Some(found) = watched.and_then(|watched| watched.found.as_mut()) {
            found.is_told = true;
        }
        Some(block)
    }

    pub fn hash(&self, block: BlockId) -> Option<PageHash> {
        self.blocks[block.0 as usize].map(|watched| watched.hash)
    }

    pub fn num_blocks(&self) -> usize {
        self.blocks.iter().flatten().count()
    }

    fn found(&self, block: BlockId) -> Option<Found> {
        self.blocks[block.0 as usize].and_then(|watched| watched.found)
    }

    pub fn is_found(&self, block: BlockId) -> bool {
        self.found(block).is_some()
    }

    pub fn is_told(&self, block: BlockId) -> bool {
        self.found(block).is_some_and(|found| found.is_told)
    }

    /// The hash of a block with `tokens` that follows `parent`.
    pub fn hash_after(&self, parent: Parent, tokens: &[TokenId]) -> PageHash {
        let parent = match parent {
            Parent::Root(namespace) => PageHash::root(self.salt, namespace),
            Parent::Block(block) => self.watched(block).hash,
        };
        parent.next(self.salt, tokens)
    }

    fn watched(&self, block: BlockId) -> WatchedBlock {
        self.blocks[block.0 as usize].expect("the block is not a whole block of the tree")
    }
}
