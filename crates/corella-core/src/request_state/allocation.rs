//! The slot and the pages of a request.

use alloc::vec::Vec;

use crate::cache::hold::Export;
use crate::cache::kv_cache::Donor;
use crate::cache::page_table::PageTables;
use crate::request_state::{Phase, RequestState};
use crate::{BlockId, PageId, SlotId, SnapshotId, StepId};

#[derive(Debug, Default)]
pub(super) struct Allocation {
    slot: Option<SlotId>,
    /// The step in which the request took its slot.
    started_step: StepId,
    tables: PageTables,
    /// The number of the request's pages, in groups without a window, that were already in use when the request took
    /// them.
    num_shared_pages: u32,
    /// The limit of rows in flight while the request prefills, so that its pages fit into the pool.
    num_rows_at_once: u32,
    /// The pages from which a step copies rows, one of each group. They stay locked until that step has returned.
    donor: Option<(Vec<PageId>, StepId)>,
    /// The time by which the KV must have arrived, while the request is receiving.
    remote_kv_deadline_us: u64,
    /// Whether the prompt was computed on another node. Then it is never computed here.
    came_with_kv: bool,
    /// The number of first rows that another node has computed.
    num_received_rows: u32,
    /// The pages of host memory that are reserved for the request while it is leaving.
    num_spill_pages: u32,
    export: Export,
    /// The snapshot for the recurrent state that comes from another node with the rows.
    received_state: Option<SnapshotId>,
    /// The block whose snapshot the slot started from.
    restored_block: Option<BlockId>,
    /// The newest snapshot that the request has taken, until the snapshot's block is in the prefix tree.
    snapshot: Option<HeldSnapshot>,
    /// The number of blocks up to the point where the request's tokens diverge from other requests, if the request
    /// takes a snapshot there; 0 otherwise.
    branch: u32,
    /// The number of blocks up to the snapshot that the request's next snapshot replaces, or 0.
    passing: u32,
}

/// A snapshot of a request's state, after a block that the prefix tree does not have yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldSnapshot {
    pub id: SnapshotId,
    /// The number of blocks up to the snapshot.
    pub num_blocks: u32,
}

impl Allocation {
    /// Nothing is held, and rows in flight have no limit.
    pub fn new() -> Self {
        Self {
            num_rows_at_once: u32::MAX,
            ..Self::default()
        }
    }

    pub fn tables(&self) -> &PageTables {
        &self.tables
    }
}

impl RequestState {
    reads! {
        allocation:
        slot: Option<SlotId>,
        started_step: StepId,
        num_shared_pages: u32,
        num_rows_at_once: u32,
        remote_kv_deadline_us: u64,
        came_with_kv: bool,
        num_spill_pages: u32,
        received_state: Option<SnapshotId>,
        restored_block: Option<BlockId>,
        snapshot: Option<HeldSnapshot>,
        branch: u32,
    }

    pub fn set_restored_block(&mut self, block: Option<BlockId>) {
        self.allocation.restored_block = block;
    }

    /// Makes the request take a snapshot after `num_blocks` blocks, where its tokens diverge from other requests.
    pub fn set_branch(&mut self, num_blocks: u32) {
        self.allocation.branch = num_blocks;
    }

    /// Makes the request's next snapshot replace the one after `num_blocks` blocks. Returns the previous number of
    /// blocks; 0 means none.
    pub fn replace_passing(&mut self, num_blocks: u32) -> u32 {
        core::mem::replace(&mut self.allocation.passing, num_blocks)
    }

    pub fn hold_snapshot(&mut self, snapshot: HeldSnapshot) {
        self.allocation.snapshot = Some(snapshot);
    }

    pub fn take_snapshot(&mut self) -> Option<HeldSnapshot> {
        self.allocation.snapshot.take()
    }

    /// # Panics
    /// Panics when the request has no slot.
    pub fn held_slot(&self) -> SlotId {
        self.allocation.slot.expect("a running request has no slot")
    }

    /// Takes a slot in `step`, and runs.
    pub fn start(&mut self, slot: SlotId, step: StepId) {
        self.allocation.slot = Some(slot);
        self.allocation.started_step = step;
        self.turn.forget_path();
        self.phase = Phase::Running;
    }

    pub fn take_slot(&mut self) -> Option<SlotId> {
        self.allocation.slot.take()
    }

    pub fn tables(&self) -> &PageTables {
        &self.allocation.tables
    }

    pub fn tables_mut(&mut self) -> &mut PageTables {
        &mut self.allocation.tables
    }

    /// Takes the request's first pages. In groups without a window, `num_shared_pages` of them were in use before.
    pub fn hold_pages(&mut self, tables: PageTables, num_shared_pages: u32) {
        self.allocation.tables = tables;
        self.allocation.num_shared_pages = num_shared_pages;
    }

    pub fn limit_rows_at_once(&mut self, num_rows: u32) {
        self.allocation.num_rows_at_once = num_rows;
    }

    /// Notes that `step` copies rows from the pages of `donor`, which stay locked until the step has returned.
    pub fn copy_from(&mut self, donor: &Donor, step: StepId) {
        self.allocation.donor = Some((donor.pages.clone(), step));
    }

    /// The pages from which a step in flight copies rows.
    pub fn donor_pages(&self) -> impl Iterator<Item = PageId> {
        let pages = self.allocation.donor.iter().flat_map(|(pages, _)| pages);
        pages.copied()
    }

    /// The pages from which `step` has copied rows.
    pub fn take_donor_of(&mut self, step: StepId) -> Option<Vec<PageId>> {
        let donor = self.allocation.donor.take_if(|(_, by)| *by == step);
        donor.map(|(pages, _)| pages)
    }

    /// Takes all pages of the request, and the pages from which a step copies.
    pub fn take_pages(&mut self) -> impl Iterator<Item = PageId> + use<> {
        let donor = self.allocation.donor.take().map(|(pages, _)| pages);
        let pages = self.allocation.tables.take_pages();
        donor.into_iter().flatten().chain(pages)
    }

    pub fn receive_until(&mut self, deadline_us: u64) {
        self.allocation.remote_kv_deadline_us = deadline_us;
    }

    pub fn receive_state(&mut self, snapshot: Option<SnapshotId>) {
        self.allocation.received_state = snapshot;
    }

    pub fn take_received_state(&mut self) -> Option<SnapshotId> {
        self.allocation.received_state.take()
    }

    pub fn note_kv_of_other_node(&mut self) {
        self.allocation.came_with_kv = true;
    }

    pub fn set_received_rows(&mut self, num_rows: u32) {
        self.allocation.num_received_rows = num_rows;
    }

    /// The number of first rows that may be published. In the namespace of another node's arithmetic, these are the
    /// received rows, because later rows are computed here, with other bits.
    pub fn num_publishable_rows(&self) -> u32 {
        match self.request.namespace.arithmetic {
            None => u32::MAX,
            Some(_) => self.allocation.num_received_rows,
        }
    }

    pub fn set_spill_pages(&mut self, num_pages: u32) {
        self.allocation.num_spill_pages = num_pages;
    }

    pub fn export(&self) -> &Export {
        &self.allocation.export
    }

    pub fn export_mut(&mut self) -> &mut Export {
        &mut self.allocation.export
    }

    /// The number of computed rows. It decides which pages outside the windows are given back. With exported pages,
    /// only the rows before the last exported row count.
    pub fn num_rows_passed(&self) -> u32 {
        let num_computed = self.num_computed_tokens();
        match self.export().num_pages() {
            0 => num_computed,
            _ => num_computed.min(self.export().end_row() - 1),
        }
    }

    /// The request's export, and its page tables.
    pub fn export_and_tables(&mut self) -> (&mut Export, &PageTables) {
        (&mut self.allocation.export, &self.allocation.tables)
    }
}
