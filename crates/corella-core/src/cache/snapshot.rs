//! Snapshots: copies of recurrent state that the executor keeps, and the blocks after which they were taken.
//!
//! A snapshot belongs to the request that takes it until the block before it is in the prefix tree, and then to that
//! block. The least recently used snapshot of a block is overwritten first, unless a reader holds it. Retained ones
//! follow when no other is left. A step restores and takes each snapshot at most once, and never does both.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::{BlockId, SnapshotId, StepId};

#[derive(Debug)]
pub(crate) struct Snapshots {
    of_blocks: Vec<Option<SnapshotId>>,
    /// By snapshot.
    entries: Vec<Entry>,
    /// The snapshots that may be overwritten, in order: those without an owner, then those of blocks that are neither
    /// pinned nor retained, least recently used first, and then retained ones, the earliest end first.
    idle: BTreeSet<(Order, SnapshotId)>,
    /// The retained snapshots, by the end of their retention.
    retained: BTreeSet<(u64, SnapshotId)>,
    /// Advances with each use.
    clock: u64,
}

/// The end of the retention, and the last use.
type Order = (u64, u64);

#[derive(Clone, Copy, Debug)]
struct Entry {
    owner: Owner,
    /// The clock at the last use; 0 without an owner.
    last_used: u64,
    /// The time at which the retention ends; 0 if the snapshot is not retained.
    retained_until_us: u64,
    /// The step whose return makes the snapshot ready.
    filled_by: StepId,
    /// The last step that takes or restores the snapshot.
    named_by: Option<StepId>,
    /// The number of holds whose readers read the snapshot.
    num_holds: u32,
}

impl Entry {
    fn order(&self) -> Order {
        (self.retained_until_us, self.last_used)
    }

    /// Whether another state may overwrite the snapshot.
    fn is_idle(&self) -> bool {
        let is_kept = match self.owner {
            Owner::Nobody => false,
            Owner::Request => true,
            Owner::Block { is_pinned, .. } => is_pinned,
        };
        !is_kept && self.num_holds == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    Request,
    Block { block: BlockId, is_pinned: bool },
}

impl Snapshots {
    pub fn new(num_snapshots: u32) -> Self {
        let entry = Entry {
            owner: Owner::Nobody,
            last_used: 0,
            retained_until_us: 0,
            filled_by: StepId(0),
            named_by: None,
            num_holds: 0,
        };
        Self {
            of_blocks: Vec::new(),
            entries: alloc::vec![entry; num_snapshots as usize],
            idle: { 0..num_snapshots }
                .map(|id| (Order::default(), SnapshotId(id)))
                .collect(),
            retained: BTreeSet::new(),
            clock: 0,
        }
    }

    pub fn num_used(&self) -> usize {
        let entries = self.entries.iter();
        entries.filter(|entry| entry.owner != Owner::Nobody).count()
    }

    pub fn of_block(&self, block: BlockId) -> Option<SnapshotId> {
        self.of_blocks.get(block.0 as usize).copied().flatten()
    }

    /// The step whose return makes a block's snapshot ready.
    pub fn filled_by(&self, block: BlockId) -> Option<StepId> {
        let id = self.of_block(block)?;
        Some(self.entry(id).filled_by)
    }

    /// Whether `step` can restore a block's snapshot. A snapshot that no step has named was filled by another writer.
    pub fn is_ready(&self, block: BlockId, step: StepId) -> bool {
        self.of_block(block).is_some_and(|id| {
            let entry = self.entry(id);
            entry.filled_by < step || entry.named_by.is_none()
        })
    }

    /// The snapshot that `step` would take.
    pub fn next(&self, step: StepId) -> Option<SnapshotId> {
        let mut idle = self.idle.iter().map(|&(_, id)| id);
        idle.find(|&id| self.entry(id).named_by < Some(step))
    }

    /// A snapshot to reserve for a later state. No step after `last_returned` names the snapshot, so other nodes may
    /// write to it from now on.
    pub fn next_at_rest(&self, last_returned: Option<StepId>) -> Option<SnapshotId> {
        let mut idle = self.idle.iter().map(|&(_, id)| id);
        idle.find(|&id| self.entry(id).named_by <= last_returned)
    }

    /// Reserves a snapshot for a request. The caller has taken the snapshot from its block.
    pub fn reserve(&mut self, id: SnapshotId) {
        debug_assert_eq!(self.entry(id).owner, Owner::Nobody);
        self.change(id, |entry| entry.owner = Owner::Request);
    }

    /// Records that `step` takes or restores a request's snapshot.
    pub fn name(&mut self, id: SnapshotId, step: StepId) {
        debug_assert_eq!(self.entry(id).owner, Owner::Request);
        self.entries[id.0 as usize].named_by = Some(step);
    }

    /// Gives a request a snapshot that `step` takes. The caller has taken the snapshot from its block.
    pub fn take(&mut self, id: SnapshotId, step: StepId) {
        self.reserve(id);
        let entry = &mut self.entries[id.0 as usize];
        entry.filled_by = step;
        entry.named_by = Some(step);
    }

    pub fn block_of(&self, id: SnapshotId) -> Option<BlockId> {
        match self.entry(id).owner {
            Owner::Block { block, .. } => Some(block),
            Owner::Nobody | Owner::Request => None,
        }
    }

    /// Gives a block, which has no snapshot, the snapshot that a request has taken after the block.
    pub fn give(&mut self, id: SnapshotId, block: BlockId) {
        debug_assert_eq!(self.entry(id).owner, Owner::Request);
        debug_assert_eq!(self.of_block(block), None);
        if self.of_blocks.len() <= block.0 as usize {
            self.of_blocks.resize(block.0 as usize + 1, None);
        }
        self.of_blocks[block.0 as usize] = Some(id);
        self.entries[id.0 as usize].owner = Owner::Block {
            block,
            is_pinned: false,
        };
        self.touch(block);
    }

    pub fn touch(&mut self, block: BlockId) {
        let Some(id) = self.of_block(block) else {
            return;
        };
        self.clock += 1;
        let clock = self.clock;
        self.change(id, |entry| entry.last_used = clock);
    }

    /// Keeps a snapshot unchanged for a reader.
    pub fn hold(&mut self, id: SnapshotId) {
        self.change(id, |entry| entry.num_holds += 1);
    }

    pub fn release(&mut self, id: SnapshotId) {
        self.change(id, |entry| entry.num_holds -= 1);
    }

    /// Changes an entry, and lists its snapshot anew if it may be overwritten.
    fn change(&mut self, id: SnapshotId, change: impl FnOnce(&mut Entry)) {
        let entry = &mut self.entries[id.0 as usize];
        let before = entry.order();
        self.idle.remove(&(before, id));
        change(entry);
        if entry.retained_until_us != before.0 {
            self.retained.remove(&(before.0, id));
            if entry.retained_until_us > 0 {
                self.retained.insert((entry.retained_until_us, id));
            }
        }
        if entry.is_idle() {
            self.idle.insert((entry.order(), id));
        }
    }

    /// Restores a block's snapshot in `step`.
    pub fn restore(&mut self, block: BlockId, step: StepId) -> Option<SnapshotId> {
        let id = self.of_block(block)?;
        self.touch(block);
        self.entries[id.0 as usize].named_by = Some(step);
        Some(id)
    }

    /// Keeps a block's snapshot until the block leaves the tree.
    pub fn pin(&mut self, block: BlockId) {
        let Some(id) = self.of_block(block) else {
            return;
        };
        self.change(id, |entry| {
            entry.owner = Owner::Block {
                block,
                is_pinned: true,
            };
            entry.retained_until_us = 0;
        });
    }

    /// Retains a block's snapshot until `end_us` or, if it is retained longer, until then. If `limit` snapshots are
    /// retained, it takes the place of the one that ends first. Returns false if none ends before it.
    pub fn retain(&mut self, block: BlockId, end_us: u64, limit: usize) -> bool {
        let Some(id) = self.of_block(block) else {
            return false;
        };
        let entry = self.entry(id);
        if let Owner::Block {
            is_pinned: true, ..
        } = entry.owner
        {
            return true;
        }
        if entry.retained_until_us == 0 && self.retained.len() >= limit {
            match self.retained.first() {
                Some(&(first_us, first)) if first_us < end_us => self.end_retention(first),
                _ => return false,
            }
        }
        self.change(id, |entry| {
            entry.retained_until_us = entry.retained_until_us.max(end_us);
        });
        true
    }

    /// Ends all retentions whose time has come.
    pub fn end_retentions(&mut self, now_us: u64) {
        while let Some(&(end_us, id)) = self.retained.first()
            && end_us <= now_us
        {
            self.end_retention(id);
        }
    }

    fn end_retention(&mut self, id: SnapshotId) {
        self.change(id, |entry| entry.retained_until_us = 0);
    }

    pub fn next_retention_end_us(&self) -> Option<u64> {
        self.retained.first().map(|&(end_us, _)| end_us)
    }

    /// Whether a snapshot can be taken from its block: it is neither pinned nor retained, and no step after
    /// `last_returned` names it.
    pub fn is_at_rest(&self, id: SnapshotId, last_returned: Option<StepId>) -> bool {
        let entry = self.entry(id);
        entry.named_by <= last_returned
            && entry.retained_until_us == 0
            && self.idle.contains(&(entry.order(), id))
    }

    /// Takes a snapshot from its owner.
    pub fn drop(&mut self, id: SnapshotId) {
        if let Some(block) = self.block_of(id) {
            self.of_blocks[block.0 as usize] = None;
        }
        self.change(id, |entry| {
            (entry.owner, entry.last_used) = (Owner::Nobody, 0);
            entry.retained_until_us = 0;
        });
    }

    fn entry(&self, id: SnapshotId) -> &Entry {
        &self.entries[id.0 as usize]
    }

    /// # Panics
    /// Panics when a snapshot and its owner do not name each other. `held` are the snapshots of requests.
    pub fn check_holders(&self, held: impl Iterator<Item = SnapshotId>) {
        let mut is_held = alloc::vec![false; self.entries.len()];
        for id in held {
            let is_twice = core::mem::replace(&mut is_held[id.0 as usize], true);
            assert!(!is_twice, "two requests hold snapshot {id}");
        }
        for (entry, is_held) in self.entries.iter().zip(is_held) {
            assert_eq!(
                entry.owner == Owner::Request,
                is_held,
                "a request holds a snapshot of another, or none holds it"
            );
        }
    }

    /// # Panics
    /// Panics when a snapshot and its block do not name each other, or a snapshot that must stay can be overwritten.
    pub fn check_invariants(&self, is_in_tree: impl Fn(BlockId) -> bool) {
        let mut num_of_blocks = 0;
        for (at, entry) in self.entries.iter().enumerate() {
            let id = SnapshotId(at as u32);
            let is_of_block = matches!(entry.owner, Owner::Block { .. });
            let is_retained = entry.retained_until_us > 0;
            assert!(
                !is_retained || is_of_block,
                "snapshot {id} is retained, and of no block"
            );
            assert_eq!(
                self.retained.contains(&(entry.retained_until_us, id)),
                is_retained,
                "snapshot {id} is listed as retained and is not, or the reverse"
            );
            if let Owner::Block { block, .. } = entry.owner {
                num_of_blocks += 1;
                assert_eq!(
                    self.of_block(block),
                    Some(id),
                    "block {block} has another snapshot than {id}"
                );
                assert!(
                    is_in_tree(block),
                    "block {block} is not in the tree and has snapshot {id}"
                );
            }
            assert_eq!(
                self.idle.contains(&(entry.order(), id)),
                entry.is_idle(),
                "snapshot {id} is listed to be overwritten and must stay, or the reverse"
            );
        }
        let of_blocks = self.of_blocks.iter().flatten();
        assert_eq!(
            of_blocks.count(),
            num_of_blocks,
            "a block has the snapshot of another"
        );
    }
}
