//! The drafter: a smaller model guesses tokens for the served model to check. It never runs during a step. If it fails,
//! it is dropped, and no request fails with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use corella_core::{
    Batch, BatchOutput, DraftRequest, InputToken, KvGroupId, PageId, PageTableDelta, RequestId,
    SlotId, SlotStart, Span, StepId, TokenId, Yield,
};
use corella_model::{Executor, ExecutorError};

use crate::log::panic_message::panic_message;
use crate::state::watchdog::{Watchdog, WatchedStep};

/// A draft model. It must have the served model's vocabulary. Its executor must have as many slots as the served
/// model's executor, because both use the same slot ids.
pub struct DraftModel {
    pub executor: Box<dyn Executor>,
    pub max_num_batched_tokens: u32,
    /// Longer requests get no drafts.
    pub max_model_len: u32,
}

/// Draws a few tokens ahead for each request that asks for drafts, between the steps of the served model, as in
/// speculative decoding (Leviathan et al., 2023). It draws with the request's own sampling parameters and generator, so
/// that two models that agree on the probabilities also draw the same token.
///
/// The drafter keeps its own KV of a request in the request's slot from one round to the next. If the request has
/// continued with other tokens than the drafts, the drafter overwrites the KV of the drafts.
pub(crate) struct Drafter {
    model: DraftModel,
    page_size: usize,
    num_pages: usize,
    sequences: Vec<Option<Sequence>>,
    free_pages: Vec<PageId>,
    round: u64,
    /// The batch of the next step. Released slots wait in the batch until it has spans.
    batch: Batch,
    watchdog: Watchdog,
}

/// The drafter's state of a request.
struct Sequence {
    request: RequestId,
    /// The tokens with KV in the pages.
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    /// The last round in which drafts were requested for the sequence.
    round: u64,
    /// No token can be drawn for the sequence, because its logits are not numbers.
    is_spoilt: bool,
}

/// A request whose drafts are being drawn.
struct Drawing {
    slot: SlotId,
    max_drafts: usize,
}

pub(crate) type Drafts = (RequestId, Vec<TokenId>);

impl Drafter {
    pub(crate) fn new(model: DraftModel, watchdog: Watchdog) -> Self {
        let layout = model.executor.kv_layout();
        Self {
            model,
            page_size: layout.page_size as usize,
            num_pages: layout.num_pages as usize,
            sequences: Vec::new(),
            free_pages: (0..layout.num_pages).rev().map(PageId).collect(),
            round: 0,
            batch: Batch::default(),
            watchdog,
        }
    }

    pub(crate) fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.model.executor.warm_up()
    }

    /// Drafts tokens for each request, up to the number that the request can use. The limits of pages, context length
    /// or steps in a round may allow fewer, or none. After an error the drafter must not be used again.
    pub(crate) fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Drafts>, String> {
        catch_unwind(AssertUnwindSafe(|| self.play_round(requests)))
            .unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_message(&*panic))))
    }

    /// The first step computes the requests' new tokens, within the budget of a step. A request that is not finished
    /// then continues in the next round, so that no prompt holds up the others for long. After that, each step draws a
    /// token for all requests that still want one.
    fn play_round(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Drafts>, String> {
        self.round += 1;
        let mut nearest_first: Vec<_> = requests
            .iter()
            .map(|request| (self.take_up(request), request))
            .collect();
        nearest_first.sort_by_key(|(kept, request)| request.tokens.len() - kept);

        let mut drawing = Vec::with_capacity(requests.len());
        let mut drafts: Vec<Drafts> = Vec::with_capacity(requests.len());
        let mut tokens_left = self.model.max_num_batched_tokens as usize;
        for (kept, request) in nearest_first {
            let DraftRequest { start, tokens, .. } = request;
            if self.catch_up(request, kept, &mut tokens_left) {
                let max_len = self.model.max_model_len as usize;
                drawing.push(Drawing {
                    slot: start.slot,
                    max_drafts: (request.max_drafts as usize).min(max_len - tokens.len() + 1),
                });
                drafts.push((start.request, Vec::new()));
            }
        }
        let watched: Arc<[RequestId]> = drafts.iter().map(|(request, _)| *request).collect();
        while !self.batch.is_empty() {
            let output = self.run_step(&watched)?;
            let mut samples = output.samples.iter().peekable();
            for (Drawing { slot, max_drafts }, (_, drafts)) in drawing.iter().zip(&mut drafts) {
                if drafts.len() == *max_drafts {
                    continue;
                }
                let drawn = samples.next_if(|(of, _)| of == slot);
                let Some((_, sample)) = drawn else {
                    // The request was left out of this step, or no token could be drawn for it.
                    let is_undrawn = output.undrawn.iter().any(|(of, _)| of == slot);
                    self.sequence(*slot).is_spoilt |= is_undrawn;
                    continue;
                };
                drafts.push(sample.token);
                if drafts.len() < *max_drafts {
                    self.go_on(*slot, sample.token);
                }
            }
        }
        Ok(drafts)
    }

    /// Finds the request's sequence in its slot, and drops the slot's sequence if it belongs to another request.
    /// Returns the number of the request's tokens whose KV the sequence has, without the last token.
    fn take_up(&mut self, request: &DraftRequest<'_>) -> usize {
        let DraftRequest { start, tokens, .. } = request;
        let slot = start.slot.0 as usize;
        if self.sequences.len() <= slot {
            self.sequences.resize_with(slot + 1, || None);
        }
        let round = self.round;
        match &mut self.sequences[slot] {
            Some(sequence) if sequence.request == start.request => {
                if !sequence.is_spoilt {
                    sequence.round = round;
                }
                let pairs = sequence.tokens.iter().zip(*tokens);
                let num_equal = pairs.take_while(|(has, is)| has == is).count();
                num_equal.min(tokens.len() - 1)
            }
            Some(_) => {
                self.drop_sequence(slot);
                0
            }
            None => 0,
        }
    }

    /// Plans the request's next tokens after the first `kept` ones. Returns true if the step computes all of the
    /// request's tokens, so that a token is drawn.
    fn catch_up(
        &mut self,
        request: &DraftRequest<'_>,
        kept: usize,
        tokens_left: &mut usize,
    ) -> bool {
        let DraftRequest { start, tokens, .. } = request;
        let slot = start.slot.0 as usize;
        if tokens.len() > self.model.max_model_len as usize {
            self.drop_sequence(slot);
            return false;
        }
        let is_spoilt = self.sequences[slot].as_ref().is_some_and(|it| it.is_spoilt);
        if is_spoilt || *tokens_left == 0 {
            return false;
        }
        let num_pages = tokens.len().div_ceil(self.page_size);
        let had = self.sequences[slot].as_ref().map(|it| it.pages.len());
        // The sequence may have been dropped for another request since `kept` was counted.
        let kept = had.map_or(0, |_| kept);
        if !self.make_room(num_pages - had.unwrap_or(0).min(num_pages)) {
            // A part of a sequence is useless, and another request can use the pages.
            self.drop_sequence(slot);
            return false;
        }
        let sequence = self.sequences[slot].get_or_insert_with(|| Sequence {
            request: start.request,
            tokens: Vec::new(),
            pages: Vec::new(),
            round: self.round,
            is_spoilt: false,
        });
        let mut first_new_page = sequence.pages.len();
        if had.is_none() || kept < sequence.tokens.len() {
            // Starting the slot again sets it back to the valid part of its pages.
            if had.is_some() {
                self.batch.released.push(start.slot);
            }
            sequence.tokens.truncate(kept);
            let mut start = SlotStart::clone(start);
            start.sampling.logprobs = None;
            start.cached_tokens = sequence.tokens.clone();
            self.batch.started.push(start);
            first_new_page = 0;
        }
        let num_new_pages = num_pages.saturating_sub(sequence.pages.len());
        let new_pages = self.free_pages.len() - num_new_pages..;
        sequence.pages.extend(self.free_pages.drain(new_pages));
        self.extend_table(start.slot, first_new_page);
        let rest = &tokens[kept..];
        let num_tokens = rest.len().min(*tokens_left);
        *tokens_left -= num_tokens;
        let draws = num_tokens == rest.len();
        self.add_span(start.slot, &rest[..num_tokens], draws);
        draws
    }

    /// Plans to draw after a draft as well, if the sequence has room for the draft's row.
    fn go_on(&mut self, slot: SlotId, draft: TokenId) {
        let sequence = self.sequence(slot);
        let (num_rows, num_pages) = (sequence.tokens.len(), sequence.pages.len());
        if num_rows == num_pages * self.page_size {
            if !self.make_room(1) {
                return;
            }
            let page = self
                .free_pages
                .pop()
                .expect("no page is free although room was made");
            self.sequence(slot).pages.push(page);
            self.extend_table(slot, num_pages);
        }
        self.add_span(slot, &[draft], true);
    }

    /// Makes sure that `num_pages` pages are free, if possible by dropping sequences without a request in this round,
    /// the longest unused first. Drops none if that would free too few pages.
    fn make_room(&mut self, num_pages: usize) -> bool {
        let idle = |it: &&Sequence| it.round < self.round;
        let sequences = || self.sequences.iter().flatten();
        if num_pages <= self.free_pages.len() {
            return true;
        }
        let num_idle: usize = sequences().filter(idle).map(|it| it.pages.len()).sum();
        if num_pages > self.free_pages.len() + num_idle {
            return false;
        }
        while self.free_pages.len() < num_pages {
            let rounds = self.sequences.iter().enumerate();
            let rounds = rounds.filter_map(|(slot, it)| Some((it.as_ref()?.round, slot)));
            let (_, slot) = rounds
                .min()
                .expect("pages are counted as idle, but no sequence is left");
            self.drop_sequence(slot);
        }
        true
    }

    fn drop_sequence(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences[slot].take() {
            self.free_pages.extend(sequence.pages);
            self.batch.released.push(SlotId(slot as u32));
        }
    }

    fn sequence(&mut self, slot: SlotId) -> &mut Sequence {
        let sequence = &mut self.sequences[slot.0 as usize];
        sequence
            .as_mut()
            .expect("a slot that draws has no sequence")
    }

    fn extend_table(&mut self, slot: SlotId, first: usize) {
        let sequence = self.sequences[slot.0 as usize].as_ref();
        let new = &sequence.expect("a slot that draws has no sequence").pages[first..];
        if new.is_empty() {
            return;
        }
        let begin = self.batch.pages.len() as u32;
        self.batch.pages.extend_from_slice(new);
        self.batch.tables.push(PageTableDelta {
            slot,
            group: KvGroupId(0),
            first: first as u32,
            pages: begin..self.batch.pages.len() as u32,
        });
    }

    fn add_span(&mut self, slot: SlotId, tokens: &[TokenId], draws: bool) {
        let sequence = self.sequences[slot.0 as usize].as_mut();
        let sequence = sequence.expect("a slot that draws has no sequence");
        let first = self.batch.tokens.len() as u32;
        let known = tokens.iter().copied().map(InputToken::Known);
        self.batch.tokens.extend(known);
        self.batch.spans.push(Span {
            slot,
            start: sequence.tokens.len() as u32,
            tokens: first..self.batch.tokens.len() as u32,
            yields: if draws { Yield::Draw } else { Yield::Nothing },
            num_drafts: 0,
        });
        sequence.tokens.extend_from_slice(tokens);
    }

    fn run_step(&mut self, requests: &Arc<[RequestId]>) -> Result<BatchOutput, String> {
        let step = self.batch.step;
        let next = Batch {
            step: StepId(step.0 + 1),
            ..Batch::default()
        };
        let batch = Arc::new(std::mem::replace(&mut self.batch, next));
        self.watchdog.watch(Some(WatchedStep {
            batch: batch.clone(),
            requests: requests.clone(),
            since: Instant::now(),
        }));
        let executor = &mut self.model.executor;
        let returned = executor
            .submit(batch)
            .and_then(|()| executor.sample(step, Vec::new()))
            .and_then(|()| executor.wait());
        self.watchdog.watch(None);
        match returned {
            Ok(output) if output.step == step => Ok(output),
            Ok(output) => Err(format!(
                "it returned step {} instead of step {step}",
                output.step
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    /// # Panics
    /// Panics when a page is lost or held twice.
    pub(crate) fn check_invariants(&self) {
        let held = self.sequences.iter().flatten().flat_map(|it| &it.pages);
        let mut pages: Vec<_> = held.chain(&self.free_pages).copied().collect();
        pages.sort_unstable();
        let all = (0..self.num_pages as u32).map(PageId);
        assert!(
            pages.into_iter().eq(all),
            "a draft page is lost or held twice"
        );
    }
}
