//! One step's work, as inert data: printable, comparable, replayable.
//!
//! An executor keeps, per slot, the page table and the token history; a batch carries only
//! what changes. A log of batches is enough to run them again elsewhere.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::{KvGroupId, PageId, RequestId, SamplingParams, SlotId, StepId, TokenId};

/// An executor applies the parts in the order of the fields, then computes all spans
/// together: a layer's K and V of every span are written before any span attends, so a span
/// may read pages that another span of the same batch fills.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub step: StepId,
    /// Slots whose request is gone (finished, aborted or preempted).
    pub released: Vec<SlotId>,
    pub started: Vec<SlotStart>,
    pub tables: Vec<PageTableDelta>,
    /// Rows copied before anything is computed, and only out of pages of earlier steps.
    pub copies: Vec<PageCopy>,
    /// At most one span a slot.
    pub spans: Vec<Span>,
    /// Backing store of `Span::tokens`.
    pub tokens: Vec<InputToken>,
    /// Backing store of `PageTableDelta::pages`.
    pub pages: Vec<PageId>,
}

/// A request takes a slot: on admission, and again when it resumes after preemption.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotStart {
    pub slot: SlotId,
    pub request: RequestId,
    pub sampling: SamplingParams,
    /// Tokens of the original prompt; what follows is output (penalties, `min_tokens`).
    pub num_prompt_tokens: u32,
    /// Tokens whose KV is already in the slot's pages (prefix hits). The slot's history
    /// starts with these; spans append to it.
    pub cached_tokens: Vec<TokenId>,
    /// End and stop tokens that must not be drawn before `min_tokens` are out.
    pub min_tokens: u32,
    pub masked_until_min_tokens: Arc<[TokenId]>,
}

/// Writes `pages` into a slot's page table from entry `first` on.
#[derive(Clone, Debug, PartialEq)]
pub struct PageTableDelta {
    pub slot: SlotId,
    pub group: KvGroupId,
    pub first: u32,
    /// Range of `Batch::pages`.
    pub pages: Range<u32>,
}

/// Copies the K and V of the first `num_rows` positions of a page, all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCopy {
    pub from: PageId,
    pub to: PageId,
    pub num_rows: u32,
}

/// Consecutive positions of one slot to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub slot: SlotId,
    /// Position of the first token; everything before it has its KV in the slot's pages.
    pub start: u32,
    /// Range of `Batch::tokens`.
    pub tokens: Range<u32>,
    /// Draw a token from the logits of the last position. False for all but the last chunk
    /// of a prompt.
    pub sample: bool,
    /// So many tokens at the end are drafts: guesses at what will be drawn. A span that has any
    /// samples, first behind its last token that is none; as long as what is drawn is the draft
    /// that follows, it draws behind that one too. So it draws one token, and one more for each
    /// draft that holds. A slot with a mask draws one. What the other drafts leave in the pages
    /// means nothing; the slot's next span starts over it, and is planned when this one has
    /// returned.
    pub num_drafts: u32,
}

/// A token to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    Known(TokenId),
    /// What an earlier, perhaps unfinished, step draws for the slot.
    FromStep {
        step: StepId,
        slot: SlotId,
    },
}

impl Batch {
    pub fn span_tokens(&self, span: &Span) -> &[InputToken] {
        &self.tokens[span.tokens.start as usize..span.tokens.end as usize]
    }

    /// The guesses among them.
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

    /// Nothing to compute. Such a batch may still release slots.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// What a step drew: for each span that samples an entry in one of the two, in their order. A
/// span with drafts may have several samples, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchOutput {
    pub step: StepId,
    pub samples: Vec<(SlotId, Sample)>,
    /// Logits that nothing can be drawn from, such as NaN, and why. Behind a draft that holds it is
    /// none: the span then ends with what was drawn before.
    pub undrawn: Vec<(SlotId, Box<str>)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub token: TokenId,
    pub logprobs: Option<Box<Logprobs>>,
}

/// Natural logarithms, of the distribution before temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub token: f32,
    /// Most likely first.
    pub top: Vec<(TokenId, f32)>,
}
