//! The kernels' data about a step, at addresses that stay the same from step to step, so that graphs of kernels can be
//! replayed.

use corella_core::{Batch, KvGroup, PageTableDelta, SlotId};
use corella_model::{DeviceError, StepRows};

use crate::attention::{AttentionItem, AttentionPlan, AttentionShape, AttentionSpan, PlanLimits};
use crate::device::{DeviceBuffer, DevicePointer, SharedDevice, Stream};
use crate::kernels::attention::ItemList;
use crate::kernels::embed::Row;
use crate::kernels::page::{PageKernels, RowCopy, TableChange};

use super::sampling::{Staging, words_of_slice};

/// The largest number of changes of page tables, or of copies, in one launch.
const CHANGES_AT_ONCE: usize = 4096;

/// The arrays of a step.
pub struct StepArrays {
    device: SharedDevice,
    num_slots: usize,
    table_len: usize,
    rows: DeviceBuffer,
    tables: DeviceBuffer,
    changes: DeviceBuffer,
    kinds: Vec<KindArrays>,
    /// The rows with wanted logits.
    head_rows: DeviceBuffer,
    /// The rows added so far, in the layout of the upload.
    uploaded: Vec<Row>,
    spans: Vec<AttentionSpan>,
}

/// The attention work of all layers with one shape of attention.
struct KindArrays {
    shape: AttentionShape,
    limits: PlanLimits,
    plan: AttentionPlan,
    small: DeviceBuffer,
    large: DeviceBuffer,
    /// The numbers of items in both lists.
    counts: DeviceBuffer,
}

/// The sizes of allocated memory.
#[derive(Clone, Copy, Debug)]
pub struct ArraySizes {
    pub max_rows: usize,
    pub max_head_rows: usize,
    pub num_slots: usize,
    /// The number of entries in a page table.
    pub table_len: usize,
    pub num_groups: usize,
}

impl StepArrays {
    /// `kinds` are the layers' shapes of attention.
    pub fn new(
        device: &SharedDevice,
        sizes: &ArraySizes,
        kinds: impl Iterator<Item = (AttentionShape, PlanLimits)>,
    ) -> Result<Self, DeviceError> {
        let new = |len: usize, size: usize| DeviceBuffer::new(device, len * size);
        let kinds = kinds.map(|(shape, limits)| {
            let max_items = shape.max_items(sizes.max_rows, &limits);
            Ok(KindArrays {
                shape,
                limits,
                plan: AttentionPlan::default(),
                small: new(max_items, size_of::<AttentionItem>())?,
                large: new(max_items, size_of::<AttentionItem>())?,
                counts: new(2, size_of::<u32>())?,
            })
        });
        Ok(Self {
            num_slots: sizes.num_slots,
            table_len: sizes.table_len,
            rows: new(sizes.max_rows, size_of::<Row>())?,
            tables: new(
                sizes.num_groups * sizes.num_slots * sizes.table_len,
                size_of::<u32>(),
            )?,
            changes: new(CHANGES_AT_ONCE, size_of::<RowCopy>())?,
            kinds: kinds.collect::<Result<_, DeviceError>>()?,
            head_rows: new(sizes.max_head_rows, size_of::<u32>())?,
            uploaded: Vec::with_capacity(sizes.max_rows),
            spans: Vec::new(),
            device: SharedDevice::clone(device),
        })
    }

    pub fn rows(&self) -> DevicePointer {
        self.rows.pointer()
    }

    pub fn head_rows(&self, first: usize) -> DevicePointer {
        self.head_rows.pointer().add(first * size_of::<u32>())
    }

    pub fn table_len(&self) -> usize {
        self.table_len
    }

    /// The page tables of a KV group, `[slot][table_len]`.
    pub fn tables(&self, group: usize) -> DevicePointer {
        let first = group * self.num_slots * self.table_len;
        self.tables.pointer().add(first * size_of::<u32>())
    }

    /// The work of a kind of attention, in tiles of few rows and of many. A graph must not depend on the amount of
    /// work. It serves decode steps, which hardly any model computes in tiles of many rows.
    pub fn items(&self, kind: usize, in_graph: bool) -> (ItemList, ItemList) {
        let kind = &self.kinds[kind];
        let list = |items: &DeviceBuffer, at: usize, num_items: Option<usize>| ItemList {
            items: items.pointer(),
            max_items: items.num_bytes() / size_of::<AttentionItem>(),
            count: kind.counts.pointer().add(at * size_of::<u32>()),
            num_items,
        };
        let (num_small, num_large) = match in_graph {
            true if kind.shape.decodes_in_large_tiles() => (None, None),
            true => (None, Some(0)),
            false => (Some(kind.plan.small.len()), Some(kind.plan.large.len())),
        };
        (
            list(&kind.small, 0, num_small),
            list(&kind.large, 1, num_large),
        )
    }

    /// Writes a batch's changes of page tables; `is_possible` has checked slot, group and pages. Entries beyond the
    /// longest context are left out, because no span reaches them.
    pub fn change_tables(
        &self,
        batch: &Batch,
        is_possible: impl Fn(&PageTableDelta) -> bool,
        kernels: &PageKernels,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        let mut changes = Vec::new();
        for delta in batch.tables.iter().filter(|delta| is_possible(delta)) {
            let entry = delta.first as usize;
            let first = self.table_entry(delta.group.0 as usize, delta.slot, entry);
            let num_entries = self.table_len.saturating_sub(entry);
            let pages = batch.delta_pages(delta).iter().take(num_entries);
            changes.extend(pages.zip(first..).map(|(page, index)| TableChange {
                index: index as u32,
                page: page.0,
            }));
        }
        // The last of several changes of one entry counts.
        changes.reverse();
        changes.sort_by_key(|change| change.index);
        changes.dedup_by_key(|change| change.index);
        for changes in changes.chunks(CHANGES_AT_ONCE) {
            self.upload(staging, &self.changes, changes)?;
            let (tables, changed) = (self.tables.pointer(), self.changes.pointer());
            // SAFETY: all indexes lie in the tables, and only the stream uses the memory.
            unsafe { kernels.change_tables(&self.device, tables, changed, changes.len())? };
        }
        Ok(())
    }

    /// Makes a page the first entry of a slot's page table in every group.
    pub fn set_only_page(
        &self,
        slot: SlotId,
        page: u32,
        groups: &[KvGroup],
        kernels: &PageKernels,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        let change = |group| TableChange {
            index: self.table_entry(group, slot, 0) as u32,
            page,
        };
        let changes: Vec<_> = (0..groups.len()).map(change).collect();
        self.upload(staging, &self.changes, &changes)?;
        let (tables, changed) = (self.tables.pointer(), self.changes.pointer());
        // SAFETY: as in `change_tables`.
        unsafe { kernels.change_tables(&self.device, tables, changed, changes.len()) }
    }

    fn table_entry(&self, group: usize, slot: SlotId, entry: usize) -> usize {
        (group * self.num_slots + slot.0 as usize) * self.table_len + entry
    }

    /// Copies checked rows of pages.
    pub fn copy_rows(
        &self,
        batch: &Batch,
        kv: DevicePointer,
        kernels: &PageKernels,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        for copies in batch.copies.chunks(CHANGES_AT_ONCE) {
            let copies: Vec<_> = copies.iter().map(RowCopy::from).collect();
            self.upload(staging, &self.changes, &copies)?;
            let pointer = self.changes.pointer();
            // SAFETY: the pages exist, and earlier steps are done with them.
            unsafe { kernels.copy_rows(&self.device, kv, pointer, copies.len())? };
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        self.uploaded.clear();
        self.spans.clear();
    }

    /// Adds a span after earlier ones. A negative token means the slot's last draw, which perhaps only the device knows
    /// yet.
    pub fn add_span(&mut self, slot: SlotId, position: usize, tokens: impl Iterator<Item = i32>) {
        let first_row = self.uploaded.len();
        let span = self.spans.len() as u32;
        self.uploaded
            .extend(tokens.zip(position as i32..).map(|(token, position)| Row {
                token,
                position,
                slot: slot.0,
                span,
            }));
        self.spans.push(AttentionSpan {
            slot: slot.0,
            first_row,
            position,
            num_tokens: self.uploaded.len() - first_row,
        });
    }

    pub fn num_rows(&self) -> usize {
        self.uploaded.len()
    }

    /// Whether each span has one row.
    pub fn is_decode(&self) -> bool {
        self.uploaded.len() == self.spans.len()
    }

    /// Uploads the added rows, padded to `num_rows`, and the work of attention.
    pub fn upload_rows(
        &mut self,
        num_rows: usize,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        self.uploaded.resize(num_rows, Row::PADDING);
        self.upload(staging, &self.rows, &self.uploaded)?;
        for kind in &mut self.kinds {
            kind.plan.build(&self.spans, &kind.shape, &kind.limits);
        }
        for kind in &self.kinds {
            self.upload(staging, &kind.small, &kind.plan.small)?;
            self.upload(staging, &kind.large, &kind.plan.large)?;
            let counts = [kind.plan.small.len() as u32, kind.plan.large.len() as u32];
            self.upload(staging, &kind.counts, &counts)?;
        }
        Ok(())
    }

    /// Uploads the indices of the rows whose logits are wanted: scored rows, then rows that are drawn from.
    pub fn upload_head_rows(
        &self,
        rows: &StepRows,
        len: usize,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        let scored = rows.scores.iter().map(|score| score.row);
        let drawn = rows.samples.iter().map(|sample| sample.row);
        let mut wanted: Vec<_> = scored.chain(drawn).map(|row| row as u32).collect();
        wanted.resize(len, 0);
        self.upload(staging, &self.head_rows, &wanted)
    }

    /// Copies values to a buffer, on the stream.
    fn upload<T: Copy>(
        &self,
        staging: &mut Staging,
        to: &DeviceBuffer,
        values: &[T],
    ) -> Result<(), DeviceError> {
        let num_bytes = size_of_val(values);
        assert!(
            num_bytes <= to.num_bytes(),
            "an array of a step is too short"
        );
        if num_bytes == 0 {
            return Ok(());
        }
        let from = staging.stage(words_of_slice(values))?;
        // SAFETY: staged words stay until the step is over, and only the stream uses the buffer.
        unsafe {
            self.device
                .copy(Stream::Compute, to.pointer(), from, num_bytes)
        }
    }
}
