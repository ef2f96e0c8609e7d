//! The rows of a step, and their results: draws, log-probabilities, hidden states.

use std::ops::Range;

use corella_core::{Batch, Pooling, SlotId, Span, TokenId, Yield};

use crate::step::slot::{Slot, Slots};

/// The rows of one step in the order of its spans. It is reused from step to step.
#[derive(Default)]
pub struct StepRows {
    pub rows: Vec<StepRow>,
    pub samples: Vec<StepSample>,
    pub scores: Vec<StepScore>,
    pub pooled: Vec<StepPool>,
}

/// One row of the step, which computes one token.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    pub token: TokenId,
    pub position: usize,
    pub span: usize,
    /// Whether the token belongs to the second text of its prompt.
    pub is_second_text: bool,
}

/// One draw. The draws that follow the drafts of the same span come right after it.
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
    /// The number of alternatives to report.
    pub num_top: usize,
}

/// A span whose hidden states are wanted.
#[derive(Clone, Debug)]
pub struct StepPool {
    pub slot: SlotId,
    /// The wanted rows: one or all.
    pub rows: Range<usize>,
    /// The position of the first wanted row.
    pub position: usize,
    /// The span's result. `None` if its rows are only added to the slot's sum.
    pub yields: Option<Pooling>,
}

impl StepRows {
    pub fn clear(&mut self) {
        self.rows.clear();
        self.samples.clear();
        self.scores.clear();
        self.pooled.clear();
    }

    /// Adds a batch's spans to cleared `StepRows`, and their tokens to the histories of their slots. Calls `on_span`
    /// for each span after its rows have been added, with its slot and these rows.
    pub fn add_spans<A>(
        &mut self,
        batch: &Batch,
        slots: &mut Slots<A>,
        max_num_batched_tokens: u32,
        mut on_span: impl FnMut(&Slot<A>, &Span, Range<usize>),
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
            slots.append(batch, span)?;
            let slot = slots.get(span.slot)?;
            let start = span.start as usize;
            let first_row = self.rows.len();
            self.add_span(index, &slot.history()[start..], start);
            if let Some(second) = slot.params.second_text {
                let num_before = (second as usize).saturating_sub(start);
                let rows = self.rows[first_row..].iter_mut().skip(num_before);
                rows.for_each(|row| row.is_second_text = true);
            }
            on_span(slot, span, first_row..self.rows.len());
            let pooling = match span.yields {
                Yield::Sum => Some(None),
                Yield::HiddenState(pooling) => Some(Some(pooling)),
                Yield::Nothing | Yield::Draw | Yield::Logprobs { .. } => None,
            };
            self.pooled.extend(pooling.map(|yields| {
                let rows = match yields {
                    Some(Pooling::LastToken) => self.rows.len() - 1..self.rows.len(),
                    Some(Pooling::FirstToken) => first_row..first_row + 1,
                    None | Some(Pooling::Mean | Pooling::Max) => first_row..self.rows.len(),
                };
                StepPool {
                    slot: span.slot,
                    position: start + rows.start - first_row,
                    rows,
                    yields,
                }
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

    /// Adds the rows of span number `span`, which computes `tokens` from position `start` on.
    pub fn add_span(&mut self, span: usize, tokens: &[TokenId], start: usize) {
        let rows = tokens.iter().enumerate().map(|(i, &token)| StepRow {
            token,
            position: start + i,
            span,
            is_second_text: false,
        });
        self.rows.extend(rows);
    }
}
