//! One step's work, as inert data: printable, comparable, replayable.
//!
//! An executor keeps the page table and the token history of each slot, so a batch carries only their changes. Another
//! executor can replay a log of batches and needs nothing else.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::{
    KvGroupId, PageId, Pooling, RequestId, SamplingParams, SlotId, SnapshotId, StepId, TokenId,
};

/// The work of one step. An executor applies the fields in their order, then computes all spans
/// together: it writes a layer's K and V of every span before any span attends, so that a span may
/// read pages that another span of the same batch fills. Snapshots are taken last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub step: StepId,
    /// Slots whose request has finished, was aborted or was preempted.
    pub released: Vec<SlotId>,
    pub started: Vec<SlotStart>,
    pub tables: Vec<PageTableDelta>,
    /// Rows to copy before any span is computed. They come only from pages of earlier steps.
    pub copies: Vec<PageCopy>,
    /// The tokens to compute: at most one span for each slot.
    pub spans: Vec<Span>,
    /// The tokens of all spans, which `Span::tokens` indexes.
    pub tokens: Vec<InputToken>,
    /// The recurrent states to keep: at most one for each span.
    pub snapshots: Vec<StateSnapshot>,
    /// The pages of all page table changes, which `PageTableDelta::pages` indexes.
    pub pages: Vec<PageId>,
}

/// A request takes a slot: on admission, and again when it resumes after preemption.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotStart {
    pub slot: SlotId,
    pub request: RequestId,
    pub sampling: SamplingParams,
    /// Length of the original prompt. Later tokens are output, for penalties and `min_tokens`.
    pub num_prompt_tokens: u32,
    /// Tokens whose KV is already in the slot's pages (prefix hits). The slot's history starts with these tokens, and
    /// spans append to the history.
    pub cached_tokens: Vec<TokenId>,
    /// The tokens in `masked_until_min_tokens` are masked until the request has drawn this many output tokens.
    pub min_tokens: u32,
    pub masked_until_min_tokens: Arc<[TokenId]>,
    /// The executor's name of the request's adapter.
    pub adapter: Option<Arc<str>>,
    /// The recurrent state after `cached_tokens`, which becomes the slot's own. Without one, the state starts at zero,
    /// and a model that has recurrent layers has no cached tokens.
    pub snapshot: Option<SnapshotId>,
}

/// A change of a slot's page table in one KV group: `pages` are its entries from `first` on. In a group with a window,
/// the entries before the first delta are missing, because they are outside the window. When later entries fall out of
/// the window, the scheduler takes back their pages without a delta, because no query reads these entries any more.
#[derive(Clone, Debug, PartialEq)]
pub struct PageTableDelta {
    pub slot: SlotId,
    pub group: KvGroupId,
    pub first: u32,
    /// The new entries, as a range of `Batch::pages`.
    pub pages: Range<u32>,
}

/// Copies K and V of the first `num_rows` positions of a page, in all layers of its KV group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCopy {
    pub from: PageId,
    pub to: PageId,
    pub num_rows: u32,
}

/// Copies a slot's recurrent state after the span of this step to a snapshot, whose old content is overwritten. The
/// span has no drafts. Steps run in order, so a later step may restore the state, and a step after that may overwrite
/// the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSnapshot {
    pub slot: SlotId,
    pub to: SnapshotId,
}

/// Consecutive positions of one slot, to be computed in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub slot: SlotId,
    /// Position of the first token. The slot's pages have the KV of all earlier positions.
    pub start: u32,
    /// The tokens to compute, as a range of `Batch::tokens`.
    pub tokens: Range<u32>,
    pub yields: Yield,
    /// The number of drafts (guessed tokens) at the end of the span. A span with drafts also draws: one token after the
    /// last token that is not a draft, and one more after each draft that equals the token drawn before it. A slot with
    /// a token mask draws only one token. Rejected drafts leave void rows in the pages. The slot's next span is planned
    /// after this step has returned, and overwrites these rows.
    pub num_drafts: u32,
}

/// The result of a span. A step computes the K and V of every span, even of one without a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Yield {
    /// No result, as for every chunk of a prompt except the last.
    #[default]
    Nothing,
    /// A token that is drawn after the last position.
    Draw,
    /// Log-probabilities of known tokens, and a draw after the last position if `draws` is set. The slot's sampling
    /// parameters give the number of alternatives.
    Logprobs {
        /// The positions of the tokens, from the span's second token to the token after its end: the logits of a
        /// position give the probability of the next token.
        positions: Range<u32>,
        /// The token after the end of the span, if its position is in `positions`.
        next: Option<TokenId>,
        draws: bool,
    },
    /// No result yet. The hidden states of the span's rows are added to the slot's sum, and a later span of the slot
    /// returns the mean. The sum begins with the slot's first position.
    Sum,
    /// One hidden state for all tokens of the slot up to the end of the span, made by the given pooling rule.
    HiddenState(Pooling),
}

impl Yield {
    pub fn draws(&self) -> bool {
        match self {
            Self::Nothing | Self::Sum | Self::HiddenState(_) => false,
            Self::Draw => true,
            Self::Logprobs { draws, .. } => *draws,
        }
    }

    /// The number of tokens whose log-probabilities are returned.
    pub fn num_logprobs(&self) -> usize {
        match self {
            Self::Logprobs { positions, .. } => positions.len(),
            Self::Nothing | Self::Draw | Self::Sum | Self::HiddenState(_) => 0,
        }
    }

    /// Whether the span has a result.
    pub fn returns(&self) -> bool {
        !matches!(self, Self::Nothing | Self::Sum)
    }
}

/// A token to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    Known(TokenId),
    /// The token that an earlier step, which may not have returned yet, draws for the slot.
    FromStep {
        step: StepId,
        slot: SlotId,
    },
}

impl Batch {
    pub fn span_tokens(&self, span: &Span) -> &[InputToken] {
        &self.tokens[span.tokens.start as usize..span.tokens.end as usize]
    }

    /// The drafts at the end of a span.
    pub fn span_drafts(&self, span: &Span) -> &[InputToken] {
        let tokens = self.span_tokens(span);
        &tokens[tokens.len() - span.num_drafts as usize..]
    }

    pub fn delta_pages(&self, delta: &PageTableDelta) -> &[PageId] {
        &self.pages[delta.pages.start as usize..delta.pages.end as usize]
    }

    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the batch computes nothing. It may still release slots.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// The last words of the reason for an undrawn span whose logits are finite, but whose request allows no token by its
/// mask and rules together.
pub const NOTHING_ALLOWED: &str = "no token is allowed here";

/// The results of a step. A span with a result has an entry in `hidden_states`, or entries in `samples`, `logprobs` or
/// both, or else one entry in `undrawn`. Each of the four follows the order of the spans. A span with drafts may have
/// several samples in a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchOutput {
    pub step: StepId,
    pub samples: Vec<(SlotId, Sample)>,
    /// The log-probabilities of the spans that yield them, in the order of their positions.
    pub logprobs: Vec<(SlotId, Vec<PromptLogprob>)>,
    /// A vector of the model's hidden size for each span that yields a hidden state.
    pub hidden_states: Vec<(SlotId, HiddenState)>,
    /// The spans that failed to give a result, each with the reason: no token can be drawn from the logits (for example
    /// NaN), or the hidden state has elements that are not numbers. Bad logits after an accepted draft are not listed:
    /// the span then ends with the tokens drawn before.
    pub undrawn: Vec<(SlotId, Box<str>)>,
}

/// A vector of the model's hidden size.
pub type HiddenState = Arc<[f32]>;

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub token: TokenId,
    pub logprobs: Option<Box<Logprobs>>,
}

/// Natural logarithms of the probabilities before temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub token: f32,
    /// 1 for the most likely token of the vocabulary. Equally likely tokens rank by id. 0 if the token comes from a
    /// node of an earlier version, which sends no rank.
    pub rank: u32,
    /// The most likely tokens, in descending order.
    pub top: Vec<(TokenId, f32)>,
}

/// The probability of a prompt token after the tokens before it, without regard to the sampling parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    pub token: TokenId,
    pub logprobs: Logprobs,
}
