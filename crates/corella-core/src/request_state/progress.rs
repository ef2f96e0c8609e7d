//! The progress of a request: counters, not phases.

use alloc::vec::Vec;

use crate::request_state::RequestState;
use crate::{StepId, TokenId};

/// The positions of a request's tokens, from left to right:
///
/// ```text
/// 0 ········ computed ········ scheduled ········ known ········ total
///   KV valid            in flight       to compute      drawn, in flight
/// ```
///
/// Prefill, a chunk of it, decode and a resumed request differ only in these boundaries.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The known tokens: the prompt, then the output that has returned.
    tokens: Vec<TokenId>,
    num_prompt_tokens: u32,
    /// The number of tokens at the beginning of the prompt whose log-probabilities have been emitted
    /// or are not wanted. The first token has none.
    num_scored_tokens: u32,
    /// Positions whose KV is in the pages, from prefix hits or from steps that have returned.
    num_computed_tokens: u32,
    /// Computed positions, and positions that steps in flight will add.
    num_scheduled_tokens: u32,
    /// The number of known tokens when the request took its slot. The request prefills up to this position.
    prefill_end: u32,
    /// The number of steps in flight that name the request, and the number of those that draw a token for it.
    num_inflight_steps: u32,
    num_inflight_samples: u32,
    last_sample_step: StepId,
    /// Guesses that a step in flight computes after the scheduled tokens. When the step returns, the right guesses
    /// become known and computed tokens. The wrong guesses are never counted.
    drafts: Vec<TokenId>,
}

impl Progress {
    pub fn new(tokens: Vec<TokenId>, num_prompt_tokens: u32, num_scored_tokens: u32) -> Self {
        Self {
            tokens,
            num_prompt_tokens,
            num_scored_tokens,
            ..Self::default()
        }
    }

    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }
}

impl RequestState {
    reads! {
        progress:
        num_prompt_tokens: u32,
        num_scored_tokens: u32,
        num_computed_tokens: u32,
        num_scheduled_tokens: u32,
        prefill_end: u32,
        num_inflight_steps: u32,
        num_inflight_samples: u32,
        last_sample_step: StepId,
    }

    pub fn tokens(&self) -> &[TokenId] {
        &self.progress.tokens
    }

    pub fn drafts(&self) -> &[TokenId] {
        &self.progress.drafts
    }

    pub fn num_known_tokens(&self) -> u32 {
        self.progress.tokens.len() as u32
    }

    pub fn num_output_tokens(&self) -> u32 {
        self.num_known_tokens() - self.progress.num_prompt_tokens
    }

    /// The number of known tokens and of tokens that steps in flight draw.
    pub fn num_total_tokens(&self) -> u32 {
        self.num_known_tokens() + self.progress.num_inflight_samples
    }

    /// The number of output tokens that are known or that steps in flight draw.
    pub fn num_drawn_tokens(&self) -> u32 {
        self.num_total_tokens() - self.progress.num_prompt_tokens
    }

    /// The number of rows that the request's tokens need: the last token needs none.
    pub fn num_rows(&self) -> u32 {
        self.num_total_tokens() - 1
    }

    pub fn is_prefilling(&self) -> bool {
        self.progress.num_scheduled_tokens < self.progress.prefill_end
    }

    /// The number of known tokens that are still to be prefilled.
    pub fn num_left_to_prefill(&self) -> u32 {
        self.progress.prefill_end - self.progress.num_scheduled_tokens
    }

    pub fn push_token(&mut self, token: TokenId) {
        self.progress.tokens.push(token);
    }

    /// Starts with the first `num_tokens` tokens computed, and no other scheduled.
    pub fn begin_at(&mut self, num_tokens: u32) {
        self.progress.num_computed_tokens = num_tokens;
        self.progress.num_scheduled_tokens = num_tokens;
    }

    /// Makes `end` the end of the request's prefill.
    pub fn prefill_to(&mut self, end: u32) {
        self.progress.prefill_end = end;
    }

    /// Forgets all rows, for a new start.
    pub fn forget_rows(&mut self) {
        self.begin_at(0);
        self.set_received_rows(0);
        self.progress.num_inflight_samples = 0;
        self.progress.prefill_end = 0;
    }

    /// Counts at most the request's first `num_rows` rows as computed.
    pub fn truncate_computed(&mut self, num_rows: u32) {
        let num_computed = &mut self.progress.num_computed_tokens;
        *num_computed = num_rows.min(*num_computed);
    }

    /// Notes that `step` computes the next `num_tokens` tokens, and whether it `draws` one after them.
    pub fn schedule_tokens(&mut self, num_tokens: u32, step: StepId, draws: bool) {
        self.progress.num_inflight_steps += 1;
        self.schedule_more(num_tokens, step, draws);
    }

    /// Notes that `step`, which computes tokens of the request already, computes the next `num_tokens` tokens, too.
    pub fn schedule_more(&mut self, num_tokens: u32, step: StepId, draws: bool) {
        self.progress.num_scheduled_tokens += num_tokens;
        if draws {
            self.progress.num_inflight_samples += 1;
            self.progress.last_sample_step = step;
        }
    }

    /// Forgets the span of a step that has returned or failed.
    pub fn forget_span(&mut self, draws: bool, num_drafts: u32) {
        self.progress.num_inflight_steps -= 1;
        self.progress.num_inflight_samples -= u32::from(draws);
        if num_drafts > 0 {
            self.progress.drafts.clear();
        }
    }

    /// Notes that a step has computed the request's tokens up to `end`, and the log-probabilities of `num_logprobs`
    /// prompt tokens. Returns whether the step has completed the prefill, which ends with the prompt or behind it.
    pub fn note_computed(&mut self, end: u32, num_logprobs: u32) -> bool {
        let progress = &mut self.progress;
        let prefill_end = progress.prefill_end;
        let completes_prefill = progress.num_computed_tokens < prefill_end && prefill_end <= end;
        progress.num_computed_tokens = end;
        progress.num_scored_tokens += num_logprobs;
        completes_prefill
    }

    /// Counts the row of an accepted draft as computed.
    pub fn note_accepted(&mut self) {
        self.progress.num_computed_tokens += 1;
        self.progress.num_scheduled_tokens += 1;
    }

    /// Guesses up to `max` tokens after the known tokens.
    pub fn propose_drafts(&mut self, max: u32) {
        if let Some(speculator) = &mut self.speculator {
            let Progress { tokens, drafts, .. } = &mut self.progress;
            speculator.propose(tokens, max, drafts);
        }
    }

    pub fn truncate_drafts(&mut self, num_drafts: u32) {
        self.progress.drafts.truncate(num_drafts as usize);
    }

    /// The number of guesses to ask a draft model for, at most `max`.
    pub fn num_drafts_to_ask(&mut self, max: u32) -> u32 {
        let speculator = self.speculator.as_mut();
        speculator.map_or(0, |speculator| {
            speculator.num_to_ask(&self.progress.tokens, max)
        })
    }

    /// Stores the tokens that a draft model has drawn after the known tokens.
    pub fn give_drafts(&mut self, drafts: Vec<TokenId>) {
        let num_tokens = self.progress.tokens.len();
        if let Some(speculator) = &mut self.speculator {
            speculator.give(num_tokens, drafts);
        }
    }
}
