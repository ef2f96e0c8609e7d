//! The states of all slots. A record takes memory at its first use.

use std::io;
use std::sync::Arc;

use corella_core::{Batch, SlotId, SnapshotId, Span};
use corella_model::DecoderSpec;

use crate::kernels::DELTA_CHUNK;
use crate::system::Region;

use super::record::{DeltaOffsets, InputRing, RecordLayout};
use super::snapshot_memory::SnapshotMemory;

pub struct StateMemory {
    layout: Arc<RecordLayout>,
    limits: StateLimits,
    /// One record for each slot, and one for warm-up.
    slots: Vec<Record>,
    snapshots: Arc<SnapshotMemory>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct StateLimits {
    pub max_num_seqs: usize,
    pub num_snapshots: usize,
    /// The largest number of drafts in a span.
    pub max_drafts: usize,
}

/// The states of one sequence.
#[derive(Default)]
pub struct Record {
    pub(super) region: Option<Region>,
    pub(super) progress: RecordProgress,
}

/// The progress of a record.
#[derive(Clone, Copy, Default)]
pub(super) struct RecordProgress {
    /// The number of tokens in the matrices: whole chunks.
    start: usize,
    /// The number of tokens without the drafts of the last span.
    pub num_known: usize,
    pub num_tokens: usize,
}

impl RecordProgress {
    /// Returns the progress after `num_tokens` tokens without drafts.
    pub fn behind(num_tokens: usize) -> Self {
        Self {
            start: num_tokens / DELTA_CHUNK * DELTA_CHUNK,
            num_known: num_tokens,
            num_tokens,
        }
    }
}

/// The state at the start of a span.
#[derive(Clone, Copy, Debug)]
pub struct SpanState {
    slot: usize,
    /// Before the span, the first token that is not in the matrices.
    pub chunk: usize,
    /// The position after the span's last token that is no draft.
    pub end_known: usize,
}

impl SpanState {
    /// After the span, the first token that is not in the matrices.
    pub fn next_chunk(&self) -> usize {
        self.end_known / DELTA_CHUNK * DELTA_CHUNK
    }
}

impl StateMemory {
    /// `None` for models without recurrent layers.
    pub fn new(spec: &DecoderSpec, limits: StateLimits) -> Option<Self> {
        let layout = Arc::new(RecordLayout::new(spec, limits.max_drafts)?);
        let snapshots = SnapshotMemory::new(Arc::clone(&layout), limits.num_snapshots);
        let slots = (0..=limits.max_num_seqs).map(|_| Record::default());
        Some(Self {
            layout,
            slots: slots.collect(),
            snapshots: Arc::new(snapshots),
            limits,
        })
    }

    pub fn snapshots(&self) -> &Arc<SnapshotMemory> {
        &self.snapshots
    }

    /// Returns the offsets of a gated delta network's state in a record.
    pub fn delta(&self, layer: usize) -> &DeltaOffsets {
        self.layout.delta(layer)
    }

    /// Returns the location of the inputs of a layer's convolution in a record.
    pub fn inputs(&self, layer: usize) -> &InputRing {
        self.layout.inputs(layer)
    }

    /// The first element of a span's record.
    pub fn record(&self, span: &SpanState) -> *mut f32 {
        let region = self.slots[span.slot].region.as_ref();
        region
            .expect("the record of a planned span has memory")
            .as_ptr()
            .cast()
    }

    /// Begins the states of starting slots. If a slot is refused, the others begin nevertheless.
    pub fn start(&mut self, batch: &Batch) -> Result<(), String> {
        let mut result = Ok(());
        for start in &batch.started {
            let num_cached = start.cached_tokens.len();
            let started = match start.snapshot {
                None if num_cached == 0 => self.set_progress(start.slot, RecordProgress::default()),
                None => Err(format!(
                    "slot {} starts after {num_cached} cached tokens without a recurrent state",
                    start.slot
                )),
                Some(snapshot) => self.restore(start.slot, snapshot, num_cached),
            };
            result = result.and(started);
        }
        result
    }

    fn set_progress(&mut self, slot: SlotId, progress: RecordProgress) -> Result<(), String> {
        self.slot_mut(slot)?.progress = progress;
        Ok(())
    }

    fn restore(&mut self, slot: SlotId, from: SnapshotId, num_cached: usize) -> Result<(), String> {
        let len = self.layout.len();
        let snapshot = self.snapshots.record(from)?;
        if snapshot.progress.num_tokens != num_cached {
            return Err(format!(
                "snapshot {from} was taken after {} tokens, but slot {slot} starts after {num_cached}",
                snapshot.progress.num_tokens
            ));
        }
        let record = { self.slots.get_mut(slot.0 as usize) };
        let record = record.ok_or_else(|| format!("slot {slot} is beyond the executor's slots"))?;
        record.copy(&snapshot, len)
    }

    /// Plans a span. The record's progress becomes the end of the span even if the step fails: steps in flight continue
    /// there.
    pub fn plan(&mut self, span: &Span) -> Result<SpanState, String> {
        let (len, max_drafts) = (self.layout.len(), self.limits.max_drafts);
        let record = self.slot_mut(span.slot)?;
        let start = span.start as usize;
        let progress = record.progress;
        if !(progress.num_known..=progress.num_tokens).contains(&start) {
            return Err(format!(
                "slot {} has the recurrent state after {} tokens; a span cannot start at {start}",
                span.slot, progress.num_tokens
            ));
        }
        if span.num_drafts as usize > max_drafts {
            return Err(format!(
                "{} drafts in one span; recurrent states can be rolled back by {max_drafts} tokens",
                span.num_drafts
            ));
        }
        let end = start + span.tokens.len();
        let state = SpanState {
            slot: span.slot.0 as usize,
            chunk: progress.start,
            end_known: end - span.num_drafts as usize,
        };
        record.commit(len)?;
        record.progress = RecordProgress {
            start: state.next_chunk(),
            num_known: state.end_known,
            num_tokens: end,
        };
        Ok(state)
    }

    /// Plans the snapshots of a step. A snapshot gets the progress of its slot even if the step fails: steps in flight
    /// may restore the snapshot, and the results of those steps are discarded.
    pub fn plan_snapshots(&mut self, batch: &Batch) -> Result<(), String> {
        for kept in &batch.snapshots {
            let progress = self.slot_mut(kept.slot)?.progress;
            self.snapshots.record(kept.to)?.progress = progress;
        }
        Ok(())
    }

    /// Plans a span from position 0 on, outside of all slots.
    pub fn plan_warm_up(&mut self, num_rows: usize) -> Result<SpanState, String> {
        let slot = self.limits.max_num_seqs;
        self.slots[slot].commit(self.layout.len())?;
        Ok(SpanState {
            slot,
            chunk: 0,
            end_known: num_rows,
        })
    }

    /// Keeps the states after a step.
    pub fn keep(&mut self, batch: &Batch) -> Result<(), String> {
        let len = self.layout.len();
        for kept in &batch.snapshots {
            let slot = self.slots.get(kept.slot.0 as usize);
            let slot =
                slot.ok_or_else(|| format!("slot {} is beyond the executor's slots", kept.slot))?;
            self.snapshots.record(kept.to)?.copy(slot, len)?;
        }
        Ok(())
    }

    fn slot_mut(&mut self, slot: SlotId) -> Result<&mut Record, String> {
        let record = self.slots.get_mut(slot.0 as usize);
        record.ok_or_else(|| format!("slot {slot} is beyond the executor's slots"))
    }
}

impl Record {
    pub(super) fn commit(&mut self, len: usize) -> Result<(), String> {
        if self.region.is_none() {
            let no_memory = |error: io::Error| format!("no memory for recurrent states: {error}");
            let region = Region::new(len * size_of::<f32>()).map_err(no_memory)?;
            self.region = Some(region);
        }
        Ok(())
    }

    fn copy(&mut self, from: &Self, len: usize) -> Result<(), String> {
        self.progress = from.progress;
        let Some(source) = &from.region else {
            return Ok(());
        };
        self.commit(len)?;
        if let Some(region) = &self.region {
            // SAFETY: both regions have `len` elements, and no worker uses them between steps.
            unsafe {
                let (from, to) = (source.as_ptr(), region.as_ptr());
                std::ptr::copy_nonoverlapping(from, to, len * size_of::<f32>());
            }
        }
        Ok(())
    }
}
