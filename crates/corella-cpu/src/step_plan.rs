//! One step in the form the forward pass walks: checked, flat, reused from step to step.

use std::ops::Range;

use corella_core::{Batch, PageId, SlotId, TokenId};
use corella_model::AttentionSpec;

use crate::attention_plan::{AttentionPlan, TaskShape};
use crate::buffer::Tiles;
use crate::grid::Grid;
use crate::slot::Slots;

#[derive(Default)]
pub struct StepPlan {
    pub rows: Vec<RowPlan>,
    pub spans: Vec<SpanPlan>,
    pages: Vec<PageId>,
    pub grid: Grid,
    pub attention: AttentionPlan,
    pub samples: Vec<SamplePlan>,
}

#[derive(Clone, Copy, Debug)]
pub struct RowPlan {
    pub token: TokenId,
    pub position: usize,
    pub span: usize,
}

#[derive(Clone, Debug)]
pub struct SpanPlan {
    pub first_row: usize,
    pub num_rows: usize,
    /// Position of the first row.
    pub start: usize,
    pages: Range<usize>,
}

/// A draw, and those behind the drafts of its span follow it.
#[derive(Clone, Copy, Debug)]
pub struct SamplePlan {
    pub slot: SlotId,
    pub row: usize,
    /// Of the slot's history: what the draw goes by.
    pub num_tokens: usize,
    /// The draft before it: it counts only if that was drawn.
    pub draft: Option<TokenId>,
}

impl StepPlan {
    pub fn pages_of(&self, span: &SpanPlan) -> &[PageId] {
        &self.pages[span.pages.clone()]
    }

    /// Whether a span has more than one row.
    pub fn is_prefill(&self) -> bool {
        self.rows.len() > self.spans.len()
    }

    pub fn clear(&mut self) {
        self.rows.clear();
        self.spans.clear();
        self.pages.clear();
        self.attention.clear();
        self.samples.clear();
    }

    /// Cuts rows where a sequence ends, or a page of it.
    pub fn page_runs(
        &self,
        rows: Range<usize>,
        page_size: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let mut next = rows.start;
        std::iter::from_fn(move || {
            let first = self.rows[..rows.end].get(next)?;
            let span = &self.spans[first.span];
            let of_page = next + page_size - first.position % page_size;
            let end = rows.end.min(of_page).min(span.first_row + span.num_rows);
            Some(std::mem::replace(&mut next, end)..end)
        })
    }

    /// Adds a batch's spans to a cleared plan. The slots' histories grow by their tokens.
    pub fn add_spans(
        &mut self,
        batch: &Batch,
        slots: &mut Slots,
        max_num_batched_tokens: u32,
    ) -> Result<(), String> {
        if batch.num_tokens() > max_num_batched_tokens as usize {
            return Err(format!(
                "{} tokens in one step; the limit is {max_num_batched_tokens}",
                batch.num_tokens()
            ));
        }
        for (index, span) in batch.spans.iter().enumerate() {
            if batch.spans[..index].iter().any(|s| s.slot == span.slot) {
                return Err(format!("slot {} has two spans in one step", span.slot));
            }
            let slot = slots.append(batch, span)?;
            let start = span.start as usize;
            self.add_span(&slot.history()[start..], start, slot.pages());
            if span.sample {
                let num_drafts = span.num_drafts as usize;
                for behind in (0..=num_drafts).rev() {
                    let num_tokens = slot.history().len() - behind;
                    let is_draft = behind < num_drafts;
                    self.samples.push(SamplePlan {
                        slot: span.slot,
                        row: self.rows.len() - 1 - behind,
                        num_tokens,
                        draft: is_draft.then(|| slot.history()[num_tokens - 1]),
                    });
                }
            }
        }
        Ok(())
    }

    pub fn add_span(&mut self, tokens: &[TokenId], start: usize, pages: &[PageId]) {
        let first_page = self.pages.len();
        self.pages.extend_from_slice(pages);
        let span = self.spans.len();
        self.spans.push(SpanPlan {
            first_row: self.rows.len(),
            num_rows: tokens.len(),
            start,
            pages: first_page..self.pages.len(),
        });
        let rows = tokens.iter().enumerate().map(|(i, &token)| RowPlan {
            token,
            position: start + i,
            span,
        });
        self.rows.extend(rows);
    }

    /// Cuts the rows into tiles and shares out the work.
    pub fn finish(
        &mut self,
        spec: &AttentionSpec,
        tile_rows: usize,
        attention: TaskShape,
        num_threads: usize,
    ) {
        let tiles = Tiles::new(self.rows.len(), tile_rows);
        self.grid = Grid::new(tiles, num_threads);
        self.attention
            .build(&self.spans, spec, attention, num_threads);
    }
}
