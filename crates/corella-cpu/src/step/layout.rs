//! The layout of one step: its rows, spans, page tables and work shares, as the forward pass walks
//! them.

use std::ops::Range;

use corella_core::{Batch, Pooling, SlotId, StepId, TokenId, Yield};
use corella_model::AttentionSpec;

use crate::attention::{AttentionPlan, Spans, TaskShape};
use crate::dense::{Grid, Tiles};
use crate::kv::PageTable;
use crate::weights::RowAdapters;

use super::slot::Slots;

/// The rows of one step and how they are divided among workers. It is reused from step to step.
#[derive(Default)]
pub struct StepLayout {
    /// The step whose layers others may wait for. `None` where the executor runs something of its
    /// own.
    pub step: Option<StepId>,
    pub rows: Vec<StepRow>,
    pub spans: Spans,
    pub grid: Grid,
    /// The plan of each kind of attention that the layers have.
    pub attention: Vec<AttentionPlan>,
    pub samples: Vec<StepSample>,
    pub scores: Vec<StepScore>,
    pub pooled: Vec<StepPool>,
    pub adapters: RowAdapters,
}

/// One row of the step, which computes one token.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    pub token: TokenId,
    pub position: usize,
    pub span: usize,
}

/// One draw. The draws that follow the drafts of the same span come right behind it.
#[derive(Clone, Copy, Debug)]
pub struct StepSample {
    pub slot: SlotId,
    /// The row whose logits are sampled.
    pub row: usize,
    /// The number of the slot's tokens that precede the drawn one.
    pub num_tokens: usize,
    /// The draft that the row computes. The draw counts only if the draw before it gave this token.
    pub draft: Option<TokenId>,
}

/// A token of a prompt whose log-probability is wanted.
#[derive(Clone, Copy, Debug)]
pub struct StepScore {
    pub slot: SlotId,
    /// The row before the token.
    pub row: usize,
    pub token: TokenId,
    /// The number of alternatives that are wanted beside it.
    pub num_top: usize,
}

/// A span whose hidden states are wanted.
#[derive(Clone, Debug)]
pub struct StepPool {
    pub slot: SlotId,
    /// The rows that are wanted: the last one or all.
    pub rows: Range<usize>,
    /// The position of the first of them.
    pub position: usize,
    /// What the span yields. `None` if its rows are only added to the slot's sum.
    pub yields: Option<Pooling>,
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
        self.attention.iter_mut().for_each(AttentionPlan::clear);
        self.samples.clear();
        self.scores.clear();
        self.pooled.clear();
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
            let first = self.rows[..rows.end].get(next)?;
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
        slots: &mut Slots,
        max_num_batched_tokens: u32,
    ) -> Result<(), String> {
        if batch.num_tokens() > max_num_batched_tokens as usize {
            return Err(format!(
                "{} tokens in one step; the limit is {max_num_batched_tokens}",
                batch.num_tokens()
            ));
        }
        self.step = Some(batch.step);
        for (index, span) in batch.spans.iter().enumerate() {
            if batch.spans[..index].iter().any(|s| s.slot == span.slot) {
                return Err(format!("slot {} has two spans in one step", span.slot));
            }
            slots.append(batch, span)?;
            let slot = slots.get(span.slot)?;
            let start = span.start as usize;
            let first_row = self.rows.len();
            self.add_span(&slot.history()[start..], start, slot.tables(span.start));
            if let Some(adapter) = &slot.adapter {
                self.adapters.add(first_row..self.rows.len(), adapter);
            }
            let pooling = match span.yields {
                Yield::Sum => Some((first_row, None)),
                Yield::HiddenState(Pooling::Mean) => Some((first_row, Some(Pooling::Mean))),
                Yield::HiddenState(Pooling::LastToken) => {
                    Some((self.rows.len() - 1, Some(Pooling::LastToken)))
                }
                Yield::Nothing | Yield::Draw | Yield::Logprobs { .. } => None,
            };
            self.pooled.extend(pooling.map(|(row, yields)| StepPool {
                slot: span.slot,
                rows: row..self.rows.len(),
                position: start + row - first_row,
                yields,
            }));
            if let Yield::Logprobs {
                positions, next, ..
            } = &span.yields
            {
                let num_top = slot.params.prompt_logprobs.unwrap_or(0) as usize;
                let score = |position: u32| StepScore {
                    slot: span.slot,
                    row: first_row + position as usize - 1 - start,
                    token: { slot.history().get(position as usize) }
                        .copied()
                        .or(*next)
                        .unwrap_or_default(),
                    num_top,
                };
                self.scores.extend(positions.clone().map(score));
            }
            if span.yields.draws() {
                let num_drafts = span.num_drafts as usize;
                for behind in (0..=num_drafts).rev() {
                    let num_tokens = slot.history().len() - behind;
                    let is_draft = behind < num_drafts;
                    self.samples.push(StepSample {
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

    /// Adds a span that computes `tokens` from position `start` on, with the page tables of its
    /// sequence in all KV groups.
    pub fn add_span<'a>(
        &mut self,
        tokens: &[TokenId],
        start: usize,
        tables: impl IntoIterator<Item = PageTable<'a>>,
    ) {
        let span = self.spans.len();
        self.spans.add(tokens.len(), start, tables);
        let rows = tokens.iter().enumerate().map(|(i, &token)| StepRow {
            token,
            position: start + i,
            span,
        });
        self.rows.extend(rows);
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
        let tiles = Tiles::new(self.rows.len(), tile_rows);
        self.grid = Grid::new(tiles, num_threads);
        self.attention
            .resize_with(kinds.len(), AttentionPlan::default);
        for (plan, spec) in self.attention.iter_mut().zip(kinds) {
            plan.build(&self.spans, spec, attention, num_threads);
        }
    }
}
