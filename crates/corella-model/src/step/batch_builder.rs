//! Builds batches by hand, for tests of executors and of readers of batches.

use std::ops::Range;
use std::sync::Arc;

use corella_core::{
    Batch, InputToken, KvGroupId, PageCopy, PageId, PageTableDelta, Pooling, RequestId,
    SamplingParams, SlotId, SlotStart, SnapshotId, Span, StateSnapshot, StepId, TokenId, Yield,
};

/// Assembles batches step by step. Ids are plain numbers here and get their types in the batch.
/// Parts may be added in any order; page-table entries and spans keep the order of the calls.
pub struct BatchBuilder {
    batch: Batch,
}

impl BatchBuilder {
    /// Starts with an empty batch for `step`.
    pub fn new(step: u64) -> Self {
        Self {
            batch: Batch {
                step: StepId(step),
                ..Batch::default()
            },
        }
    }

    /// Releases a slot.
    pub fn release(&mut self, slot: u32) -> &mut Self {
        self.batch.released.push(SlotId(slot));
        self
    }

    /// Starts a request without cached KV. Its id comes from the slot and the step.
    pub fn start(
        &mut self,
        slot: u32,
        num_prompt_tokens: usize,
        sampling: &SamplingParams,
    ) -> &mut Self {
        self.start_cached(slot, num_prompt_tokens, sampling, &[])
    }

    /// Starts a request whose first tokens already have their KV in pages.
    pub fn start_cached(
        &mut self,
        slot: u32,
        num_prompt_tokens: usize,
        sampling: &SamplingParams,
        cached_tokens: &[TokenId],
    ) -> &mut Self {
        self.start_slot(SlotStart {
            slot: SlotId(slot),
            request: RequestId(self.batch.step.0 << 32 | u64::from(slot)),
            sampling: sampling.clone(),
            num_prompt_tokens: num_prompt_tokens as u32,
            cached_tokens: cached_tokens.to_vec(),
            min_tokens: 0,
            masked_until_min_tokens: Arc::new([]),
            adapter: None,
            snapshot: None,
        })
    }

    /// Starts a slot.
    pub fn start_slot(&mut self, start: SlotStart) -> &mut Self {
        self.batch.started.push(start);
        self
    }

    /// Keeps a slot's recurrent state after the step.
    pub fn keep_state(&mut self, slot: u32, to: u32) -> &mut Self {
        self.batch.snapshots.push(StateSnapshot {
            slot: SlotId(slot),
            to: SnapshotId(to),
        });
        self
    }

    /// Makes the newest starting slot continue from a kept state.
    pub fn restore_state(&mut self, from: u32) -> &mut Self {
        if let Some(start) = self.batch.started.last_mut() {
            start.snapshot = Some(SnapshotId(from));
        }
        self
    }

    /// Sets the entries of a slot's page table in the first KV group from `first` on.
    pub fn pages(&mut self, slot: u32, first: usize, pages: &[u32]) -> &mut Self {
        self.pages_of_group(slot, 0, first, pages)
    }

    /// Sets the entries of a slot's page table in a KV group from `first` on.
    pub fn pages_of_group(
        &mut self,
        slot: u32,
        group: usize,
        first: usize,
        pages: &[u32],
    ) -> &mut Self {
        let begin = self.batch.pages.len() as u32;
        self.batch.pages.extend(pages.iter().copied().map(PageId));
        self.batch.tables.push(PageTableDelta {
            slot: SlotId(slot),
            group: KvGroupId(group as u8),
            first: first as u32,
            pages: begin..self.batch.pages.len() as u32,
        });
        self
    }

    /// Copies the first `num_rows` rows of a page to another.
    pub fn copy(&mut self, from: u32, to: u32, num_rows: usize) -> &mut Self {
        let num_rows = num_rows as u32;
        self.batch.copies.push(PageCopy {
            from: PageId(from),
            to: PageId(to),
            num_rows,
        });
        self
    }

    /// Adds a span of known tokens from position `start` on.
    pub fn span(&mut self, slot: u32, start: usize, tokens: &[TokenId], draws: bool) -> &mut Self {
        self.inputs(
            slot,
            start,
            tokens.iter().copied().map(InputToken::Known),
            draws,
        )
    }

    /// Adds a span that draws, with drafts after its tokens.
    pub fn span_with_drafts(
        &mut self,
        slot: u32,
        start: usize,
        tokens: &[TokenId],
        drafts: &[TokenId],
    ) -> &mut Self {
        self.span(slot, start, &[tokens, drafts].concat(), true);
        if let Some(span) = self.batch.spans.last_mut() {
            span.num_drafts = drafts.len() as u32;
        }
        self
    }

    /// Makes the newest span return the log-probabilities of the tokens at `positions`; `next` is the one after its
    /// end.
    pub fn logprobs(&mut self, positions: Range<u32>, next: Option<TokenId>) -> &mut Self {
        if let Some(span) = self.batch.spans.last_mut() {
            span.yields = Yield::Logprobs {
                positions,
                next,
                draws: span.yields.draws(),
            };
        }
        self
    }

    /// Makes the newest span return a hidden state, or add to the sum of one.
    pub fn pool(&mut self, pooling: Pooling, is_last: bool) -> &mut Self {
        if let Some(span) = self.batch.spans.last_mut() {
            span.yields = match pooling {
                _ if is_last => Yield::HiddenState(pooling),
                Pooling::LastToken | Pooling::FirstToken | Pooling::Max => Yield::Nothing,
                Pooling::Mean => Yield::Sum,
            };
        }
        self
    }

    /// Adds a span of one token, which `step` draws for the slot.
    pub fn span_from_step(&mut self, slot: u32, start: usize, step: u64) -> &mut Self {
        let input = InputToken::FromStep {
            step: StepId(step),
            slot: SlotId(slot),
        };
        self.inputs(slot, start, [input], true)
    }

    fn inputs(
        &mut self,
        slot: u32,
        start: usize,
        inputs: impl IntoIterator<Item = InputToken>,
        draws: bool,
    ) -> &mut Self {
        let begin = self.batch.tokens.len() as u32;
        self.batch.tokens.extend(inputs);
        self.batch.spans.push(Span {
            slot: SlotId(slot),
            start: start as u32,
            tokens: begin..self.batch.tokens.len() as u32,
            yields: if draws { Yield::Draw } else { Yield::Nothing },
            num_drafts: 0,
        });
        self
    }

    /// Returns the batch so far, and begins one for the next step.
    pub fn build(&mut self) -> Arc<Batch> {
        let next = Batch {
            step: StepId(self.batch.step.0 + 1),
            ..Batch::default()
        };
        Arc::new(std::mem::replace(&mut self.batch, next))
    }
}
