//! The layout of one step for the forward pass: its rows, spans, page tables and work shares.

use std::ops::Range;

use corella_core::{Batch, StepId, TokenId};
use corella_model::{AttentionSpec, PageTable, Slots, StepRows};

use crate::attention::{AttentionPlan, Spans, TaskShape};
use crate::dense::{Grid, Tiles};
use crate::recurrent::SpanState;
use crate::weights::{PackedAdapter, RowAdapters};

/// The rows of one step and their division among workers. A layout is reused from step to step.
#[derive(Default)]
pub struct StepLayout {
    /// The step whose layers other threads may wait for. `None` for the executor's internal steps.
    pub step: Option<StepId>,
    pub rows: StepRows,
    pub spans: Spans,
    /// The states with which the spans begin, if layers have any.
    pub states: Vec<SpanState>,
    pub grid: Grid,
    /// The plan of each kind of attention that the layers have.
    pub attention: Vec<AttentionPlan>,
    pub adapters: RowAdapters,
}

impl StepLayout {
    /// Whether any span has more than one row.
    pub fn is_prefill(&self) -> bool {
        self.spans.have_prefill()
    }

    pub fn clear(&mut self) {
        self.step = None;
        self.rows.clear();
        self.spans.clear();
        self.states.clear();
        self.attention.iter_mut().for_each(AttentionPlan::clear);
        self.adapters.clear();
    }

    /// Cuts a range of rows into runs that lie in one page of one sequence.
    pub fn page_runs(
        &self,
        rows: Range<usize>,
        page_size: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let mut next = rows.start;
        std::iter::from_fn(move || {
            let first = self.rows.rows[..rows.end].get(next)?;
            let span = &self.spans[first.span];
            let of_page = next + page_size - first.position % page_size;
            let end = rows.end.min(of_page).min(span.first_row + span.num_rows);
            Some(std::mem::replace(&mut next, end)..end)
        })
    }

    /// Adds a batch's spans to a cleared layout, and their tokens to the histories of their slots.
    pub fn add_spans(
        &mut self,
        batch: &Batch,
        slots: &mut Slots<PackedAdapter>,
        max_num_batched_tokens: u32,
    ) -> Result<(), String> {
        self.step = Some(batch.step);
        let Self {
            rows,
            spans,
            adapters,
            ..
        } = self;
        rows.add_spans(batch, slots, max_num_batched_tokens, |slot, span, rows| {
            spans.add(rows.len(), span.start as usize, slot.tables(span.start));
            if let Some(adapter) = &slot.adapter {
                adapters.add(rows, adapter);
            }
        })
    }

    /// Adds a span that computes `tokens` from position `start` on, with the page tables of its
    /// sequence in all KV groups.
    pub fn add_span<'a>(
        &mut self,
        tokens: &[TokenId],
        start: usize,
        tables: impl IntoIterator<Item = PageTable<'a>>,
    ) {
        self.rows.add_span(self.spans.len(), tokens, start);
        self.spans.add(tokens.len(), start, tables);
    }

    /// Divides the rows into tiles, and the work among the threads. `kinds` has an example of each
    /// kind of attention. Call it after the last span.
    pub fn finish<'a>(
        &mut self,
        kinds: impl ExactSizeIterator<Item = &'a AttentionSpec>,
        tile_rows: usize,
        attention: TaskShape,
        num_threads: usize,
    ) {
        let tiles = Tiles::new(self.rows.rows.len(), tile_rows);
        self.grid = Grid::new(tiles, num_threads);
        self.attention
            .resize_with(kinds.len(), AttentionPlan::default);
        for (plan, spec) in self.attention.iter_mut().zip(kinds) {
            plan.build(&self.spans, spec, attention, num_threads);
        }
    }
}
