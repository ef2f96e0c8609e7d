//! A step during planning: the batch so far and the rest of the budget.

use alloc::vec::Vec;

use crate::cache::page_table::PageTable;
use crate::queue::aged_request::AdmissionRound;
use crate::request_state::{RequestIndex, RequestState, RequestTable};
use crate::{
    Batch, InputToken, KvGroupId, PageCopy, PageTableDelta, SchedulerConfig, SlotId, SlotStart,
    SnapshotId, Span, StepId, Yield,
};

#[derive(Debug)]
pub(crate) struct StepPlan {
    pub batch: Batch,
    /// The requests of the spans, in the order of `batch.spans`.
    pub entries: Vec<InflightSpan>,
    pub budget: StepBudget,
    /// A running request could not get a page, so no waiting request starts in this step.
    pub is_short_of_pages: bool,
    pub round: AdmissionRound,
}

/// The remaining tokens and prefills of the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepBudget {
    pub tokens_left: u32,
    pub prefill_tokens_left: u32,
    pub num_prefill_tokens: u32,
    pub prefill_seqs_left: u32,
}

/// A planned step that has not returned.
#[derive(Debug)]
pub(crate) struct InflightStep {
    pub step: StepId,
    pub spans: Vec<InflightSpan>,
    pub planned_us: u64,
    pub num_tokens: u32,
    pub num_prefill_tokens: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct InflightSpan {
    pub index: RequestIndex,
    pub slot: SlotId,
    /// The position after the span's last token that is not a draft.
    pub end: u32,
    pub draws: bool,
    pub num_logprobs: u32,
    pub has_hidden_state: bool,
    pub num_drafts: u32,
}

impl StepBudget {
    fn new(config: &SchedulerConfig) -> Self {
        Self {
            tokens_left: config.max_num_batched_tokens,
            prefill_tokens_left: config.max_prefill_tokens,
            num_prefill_tokens: 0,
            prefill_seqs_left: config.max_prefill_seqs,
        }
    }

    /// Prompt tokens that the step can compute for a request that is not in it yet.
    pub fn prefill_room(&self) -> u32 {
        if self.prefill_seqs_left == 0 {
            return 0;
        }
        self.prefill_tokens()
    }

    /// Prompt tokens that the step can still compute for requests that are in it already.
    pub fn prefill_tokens(&self) -> u32 {
        self.tokens_left.min(self.prefill_tokens_left)
    }

    /// Takes tokens for a prefill. A prompt that is computed alone may exceed the step's share for prefills.
    pub fn take_prefill(&mut self, num_tokens: u32) {
        self.tokens_left -= num_tokens;
        self.prefill_tokens_left = self.prefill_tokens_left.saturating_sub(num_tokens);
        self.num_prefill_tokens += num_tokens;
    }
}

impl StepPlan {
    /// Reserves space for a decode of each of `num_running` requests, so that the lists need no copies to grow.
    pub fn new(step: StepId, config: &SchedulerConfig, num_running: usize) -> Self {
        Self {
            batch: Batch {
                step,
                spans: Vec::with_capacity(num_running),
                tokens: Vec::with_capacity(num_running),
                ..Batch::default()
            },
            entries: Vec::with_capacity(num_running),
            budget: StepBudget::new(config),
            is_short_of_pages: false,
            round: AdmissionRound::default(),
        }
    }

    /// Announces a request's slot, with the tokens that its pages already hold, and the recurrent state after them.
    pub fn start_slot(&mut self, state: &RequestState, slot: SlotId, snapshot: Option<SnapshotId>) {
        let num_cached_tokens = state.num_scheduled_tokens() as usize;
        self.batch.started.push(SlotStart {
            snapshot,
            ..state.slot_start(slot, num_cached_tokens)
        });
    }

    pub fn takes_snapshot_of(&self, slot: SlotId) -> bool {
        self.batch.snapshots.iter().any(|taken| taken.slot == slot)
    }

    /// Announces the page tables of a request that takes a slot.
    pub fn start_tables(&mut self, state: &RequestState, slot: SlotId) {
        self.extend_tables(state, slot, |_, table| table.num_gone);
    }

    /// Announces the pages of a request's tables from the entry that `first` gives.
    pub fn extend_tables(
        &mut self,
        state: &RequestState,
        slot: SlotId,
        first: impl Fn(usize, &PageTable) -> usize,
    ) {
        for (group, table) in state.tables().iter().enumerate() {
            let first = first(group, table);
            if first >= table.len() {
                continue;
            }
            let start = self.batch.pages.len() as u32;
            let pages = &table.pages[first - table.num_gone..];
            self.batch.pages.extend(pages);
            self.batch.tables.push(PageTableDelta {
                slot,
                group: KvGroupId(group as u8),
                first: first as u32,
                pages: start..self.batch.pages.len() as u32,
            });
        }
    }

    pub fn copy_rows(&mut self, copy: PageCopy) {
        self.batch.copies.push(copy);
    }

    /// Adds the next `num_tokens` tokens of a request and advances its counters.
    pub fn add_span(&mut self, index: RequestIndex, state: &mut RequestState, num_tokens: u32) {
        let slot = state.held_slot();
        let start = state.num_scheduled_tokens();
        let end = start + num_tokens;
        let first = self.batch.tokens.len() as u32;
        if state.is_prefilling() {
            let known = &state.tokens()[start as usize..end as usize];
            let known = known.iter().copied().map(InputToken::Known);
            self.batch.tokens.extend(known);
            self.budget.prefill_seqs_left -= 1;
            self.budget.take_prefill(num_tokens);
        } else {
            self.budget.tokens_left -= num_tokens;
            let token = match state.tokens().get(start as usize) {
                Some(&token) => InputToken::Known(token),
                None => InputToken::FromStep {
                    step: state.last_sample_step(),
                    slot,
                },
            };
            self.batch.tokens.push(token);
        }
        let yields = state.yields(start, end);
        let draws = yields.draws();
        self.entries.push(InflightSpan {
            index,
            slot,
            end,
            draws,
            num_logprobs: yields.num_logprobs() as u32,
            has_hidden_state: matches!(yields, Yield::HiddenState(_)),
            num_drafts: 0,
        });
        self.batch.spans.push(Span {
            slot,
            start,
            tokens: first..self.batch.tokens.len() as u32,
            yields,
            num_drafts: 0,
        });
        state.schedule_tokens(num_tokens, self.batch.step, draws);
    }

    /// Lengthens the prefill span at `at` by the request's next `num_tokens` tokens.
    pub fn lengthen_span(&mut self, at: usize, state: &mut RequestState, num_tokens: u32) {
        let start = state.num_scheduled_tokens() as usize;
        let end = state.num_scheduled_tokens() + num_tokens;
        let known = &state.tokens()[start..end as usize];
        let known = known.iter().copied().map(InputToken::Known);
        let behind = self.batch.spans[at].tokens.end as usize;
        self.batch.tokens.splice(behind..behind, known);
        let span = &mut self.batch.spans[at];
        span.tokens.end += num_tokens;
        span.yields = state.yields(span.start, end);
        let (draws, num_logprobs) = (span.yields.draws(), span.yields.num_logprobs() as u32);
        let has_hidden_state = matches!(span.yields, Yield::HiddenState(_));
        for later in &mut self.batch.spans[at + 1..] {
            later.tokens = later.tokens.start + num_tokens..later.tokens.end + num_tokens;
        }
        let entry = &mut self.entries[at];
        (entry.end, entry.draws, entry.num_logprobs) = (end, draws, num_logprobs);
        entry.has_hidden_state = has_hidden_state;
        self.budget.take_prefill(num_tokens);
        state.schedule_more(num_tokens, self.batch.step, draws);
    }

    /// Inserts the requests' drafts after their tokens. All drafts are inserted in one pass, because each insertion
    /// moves every token after it.
    pub fn insert_drafts(&mut self, requests: &RequestTable) {
        let num_drafts: u32 = self.entries.iter().map(|entry| entry.num_drafts).sum();
        let num_tokens = self.batch.tokens.len() + num_drafts as usize;
        let mut tokens = Vec::with_capacity(num_tokens);
        for (span, entry) in self.batch.spans.iter_mut().zip(&self.entries) {
            let known = span.tokens.start as usize..span.tokens.end as usize;
            let first = tokens.len() as u32;
            tokens.extend_from_slice(&self.batch.tokens[known]);
            if entry.num_drafts > 0 {
                let drafts = requests[entry.index].drafts().iter();
                tokens.extend(drafts.copied().map(InputToken::Known));
            }
            span.tokens = first..tokens.len() as u32;
            span.num_drafts = entry.num_drafts;
        }
        self.batch.tokens = tokens;
        self.budget.tokens_left -= num_drafts;
    }
}
