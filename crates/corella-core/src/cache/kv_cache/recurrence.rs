//! Recurrent layers: the blocks with a snapshot, from which a request can continue.
//!
//! A prefix is found only up to a block with a snapshot. The request computes the later rows again, even if the tree
//! has them. If no other request holds their pages, the request's own pages replace them
//! ([`take_over`](KvCache::take_over)), so that its path continues.

use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::{BlockId, PageId, SnapshotId, StepId};

impl KvCache {
    /// Sets up the cache for a model with recurrent layers, whose executor keeps `num_snapshots` snapshots.
    pub fn with_snapshots(mut self, num_snapshots: u32) -> Self {
        self.residency.keep_snapshots(num_snapshots);
        self
    }

    pub(crate) fn is_recurrent(&self) -> bool {
        self.residency.snapshots().is_some()
    }

    /// The number of snapshots that hold a state.
    pub fn num_snapshots(&self) -> usize {
        let snapshots = self.residency.snapshots();
        snapshots.map_or(0, |snapshots| snapshots.num_used())
    }

    pub(crate) fn has_snapshot(&self, block: BlockId) -> bool {
        self.snapshot_filled_by(block).is_some()
    }

    /// The step whose return makes a block's snapshot ready.
    pub(crate) fn snapshot_filled_by(&self, block: BlockId) -> Option<StepId> {
        self.residency.snapshots()?.filled_by(block)
    }

    /// Whether `step` can take a snapshot.
    pub(crate) fn can_take_snapshot(&self, step: StepId) -> bool {
        let snapshots = self.residency.snapshots();
        snapshots.is_some_and(|snapshots| snapshots.next(step).is_some())
    }

    /// Returns a snapshot for `step` to take. The caller gives it to a block or drops it. The step overwrites the least
    /// recently used snapshot. `None` when all snapshots have to stay.
    pub(crate) fn try_take_snapshot(&mut self, step: StepId) -> Option<SnapshotId> {
        let id = self.residency.snapshots()?.next(step)?;
        self.drop_snapshot(id);
        self.residency.snapshots_mut()?.take(id, step);
        Some(id)
    }

    /// Holds the snapshot of a path's last block for a reader. The caller releases it.
    pub(crate) fn hold_snapshot(&mut self, path: &[BlockId]) -> Option<SnapshotId> {
        let snapshots = self.residency.snapshots_mut()?;
        let id = snapshots.of_block(*path.last()?)?;
        snapshots.hold(id);
        Some(id)
    }

    pub(crate) fn release_snapshot(&mut self, id: SnapshotId) {
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.release(id);
        }
    }

    /// Reserves a snapshot for the state that a request sends to another node, or receives from one, or that a fetch
    /// brings. The caller drops it. `None` when all snapshots have to stay, or steps after `last_returned` name them.
    pub(crate) fn try_reserve_snapshot(
        &mut self,
        last_returned: Option<StepId>,
    ) -> Option<SnapshotId> {
        let id = self.residency.snapshots()?.next_at_rest(last_returned)?;
        self.drop_snapshot(id);
        self.residency.snapshots_mut()?.reserve(id);
        Some(id)
    }

    /// Records that `step` takes or restores a snapshot that is reserved for a request.
    pub(crate) fn name_snapshot(&mut self, id: SnapshotId, step: StepId) {
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.name(id, step);
        }
    }

    /// Gives a block a snapshot. If the block has one, drops the new one.
    pub(crate) fn give_snapshot(&mut self, id: SnapshotId, block: BlockId) {
        if self.has_snapshot(block) {
            self.touch_snapshot(block);
            self.drop_snapshot(id);
            return;
        }
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.give(id, block);
            self.offers.forget(block);
            self.announce(block);
        }
    }

    pub(crate) fn touch_snapshot(&mut self, block: BlockId) {
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.touch(block);
        }
    }

    /// The snapshot of a block, for `step` to restore.
    pub(crate) fn restore_snapshot(&mut self, block: BlockId, step: StepId) -> Option<SnapshotId> {
        self.residency.snapshots_mut()?.restore(block, step)
    }

    pub(crate) fn pin_snapshot(&mut self, block: BlockId) {
        if let Some(snapshots) = self.residency.snapshots_mut() {
            snapshots.pin(block);
        }
    }

    /// Retains a block's snapshot until `end_us`. Returns false if the limit leaves no room for it.
    pub(super) fn retain_snapshot(&mut self, block: BlockId, end_us: u64, limit: usize) -> bool {
        let snapshots = self.residency.snapshots_mut();
        snapshots.is_none_or(|snapshots| snapshots.retain(block, end_us, limit))
    }

    /// Takes a snapshot from its block or its request.
    pub(crate) fn drop_snapshot(&mut self, id: SnapshotId) {
        if let Some(snapshots) = self.residency.snapshots_mut() {
            let block = snapshots.block_of(id);
            snapshots.drop(id);
            if let (Some(block), Some(watch)) = (block, &mut self.watch) {
                watch.note_lost(block);
            }
        }
    }

    /// Takes a block's snapshot from it, if any.
    pub(crate) fn drop_snapshot_of(&mut self, block: BlockId) {
        let snapshots = self.residency.snapshots();
        if let Some(id) = snapshots.and_then(|snapshots| snapshots.of_block(block)) {
            self.drop_snapshot(id);
        }
    }

    /// Takes a block's snapshot from it, if it is neither pinned nor retained and no step in flight names the snapshot.
    pub(crate) fn drop_passing_snapshot_of(
        &mut self,
        block: BlockId,
        last_returned: Option<StepId>,
    ) {
        let snapshots = self.residency.snapshots();
        if let Some(snapshots) = snapshots
            && let Some(id) = snapshots.of_block(block)
            && snapshots.is_at_rest(id, last_returned)
        {
            self.drop_snapshot(id);
        }
    }

    /// Replaces a block's pages in groups without a window by locked pages, if no table names the block's pages.
    /// Returns whether it did.
    pub(crate) fn take_over(
        &mut self,
        block: BlockId,
        page: impl Fn(usize) -> Option<PageId>,
        filled_by: StepId,
    ) -> bool {
        let is_full = |kv: &Self, group: usize| kv.residency.groups()[group].window.is_none();
        let all = 0..self.residency.groups().len();
        let is_free = |group: usize| {
            let its = self.residency.page(block, group);
            !is_full(self, group)
                || page(group).is_some() && its.is_some_and(|its| !self.is_locked(its))
        };
        if !self.is_recurrent() || !all.clone().all(is_free) {
            return false;
        }
        let full: Vec<_> = all.filter(|&group| is_full(self, group)).collect();
        let end_us = |group| {
            let its = self.residency.page(block, group);
            its.map_or(0, |its| self.retained.end_us(its))
        };
        let ends_us: Vec<_> = full.iter().map(|&group| (group, end_us(group))).collect();
        for group in full {
            self.drop_page(block, group);
        }
        self.removed.clear();
        self.fill_block(block, page, filled_by);
        for (group, end_us) in ends_us {
            if let Some(page) = self.residency.page(block, group)
                && end_us > 0
            {
                self.set_retention(page, end_us);
            }
        }
        true
    }
}
