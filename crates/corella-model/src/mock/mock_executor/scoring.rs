//! The mock's results for prompts: log-probabilities and hidden states.

use std::ops::Range;

use corella_core::{HiddenState, Logprobs, Pooling, PromptLogprob, Span, TokenId, Yield};

use super::{MockExecutor, row_index, slot_mut};
use crate::{SpanPool, score};

impl MockExecutor {
    /// Adds a span's hidden states to the sum of its slot, if wanted, and returns the hidden state that the span
    /// yields.
    pub(super) fn pool_span(&mut self, span: &Span) -> Result<Option<HiddenState>, String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        let end = span.start as usize + span.tokens.len();
        let (first, pooling) = match span.yields {
            Yield::Sum => (span.start as usize, Pooling::Mean),
            Yield::HiddenState(Pooling::LastToken) => (end - 1, Pooling::LastToken),
            Yield::HiddenState(pooling) => (span.start as usize, pooling),
            Yield::Nothing | Yield::Draw | Yield::Logprobs { .. } => return Ok(None),
        };
        let mut state = vec![0.0; self.config.hidden_size];
        let mut pool = SpanPool::new(pooling);
        for position in first..end {
            let row = row_index(slot, 0, position, self.config.page_size)?;
            if !slot.undefined {
                state = self.config.hidden_state(self.kv.load(0, row).chain);
            }
            slot.mean.add(position, &state);
            pool.add(position, &state);
        }
        match span.yields {
            Yield::HiddenState(Pooling::Mean) if !slot.undefined => match slot.mean.mean(end) {
                None => Err(format!("slot {} has not added all its rows", span.slot)),
                mean => Ok(mean),
            },
            Yield::HiddenState(_) if slot.undefined => Ok(Some(state.into())),
            Yield::HiddenState(_) => match pool.pooled() {
                None => Err(format!("slot {} is not computed by one span", span.slot)),
                pooled => Ok(pooled),
            },
            _ => Ok(None),
        }
    }

    /// The log-probabilities of a slot's tokens at `positions`, from the rows before them.
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
            let token = slot.sequence.tokens.get(position).copied().or(next);
            let token = token.expect("the range of positions was checked");
            if slot.undefined {
                let token_alone = Logprobs {
                    token: 0.0,
                    rank: 1,
                    top: Vec::new(),
                };
                return Ok(PromptLogprob {
                    token,
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
