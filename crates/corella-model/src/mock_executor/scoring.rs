//! The mock's log-probabilities of prompts.

use std::ops::Range;

use corella_core::{Logprobs, PromptLogprob, Span, TokenId};

use super::{MockExecutor, row_index, slot_mut};
use crate::score;

impl MockExecutor {
    /// The log-probabilities of a slot's tokens at `positions`, by the rows before them.
    pub(super) fn score_span(
        &mut self,
        span: &Span,
        positions: Range<u32>,
        next: Option<TokenId>,
    ) -> Result<Vec<PromptLogprob>, String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        let (start, end) = (span.start, span.start + span.tokens.len() as u32);
        let num_top = slot.sequence.start.sampling.prompt_logprobs;
        if positions.start <= start || positions.end > end + u32::from(next.is_some()) {
            return Err(format!(
                "slot {} cannot score {positions:?} in a span of {start}..{end}",
                span.slot
            ));
        }
        let num_top = num_top.ok_or_else(|| format!("slot {} wants no scores", span.slot))?;
        let score = |position: u32| {
            let position = position as usize;
            let token = { slot.sequence.tokens.get(position).copied() }.or(next);
            let token = token.expect("the range of positions was checked");
            if slot.undefined {
                let token_alone = Logprobs {
                    token: 0.0,
                    top: Vec::new(),
                };
                return Ok(PromptLogprob {
                    token,
                    rank: 1,
                    logprobs: token_alone,
                });
            }
            let row = row_index(slot, 0, position - 1, self.config.page_size)?;
            let chain = self.kv.load(0, row).chain;
            let logits = &mut self.logits;
            self.config
                .fill_logits(&slot.sequence, position, chain, logits);
            score(logits, token, num_top as usize).map_err(|error| error.to_string())
        };
        positions.map(score).collect()
    }
}
