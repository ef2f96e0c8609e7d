//! A formula for the duration of a step.

use std::time::Duration;

use corella_core::{Batch, Span};

/// The parts of a step's duration, in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// The cost of every step.
    pub per_step_us: f64,
    /// The cost per computed token of a prompt.
    pub per_token_us: f64,
    /// The cost per computed token of a decode, drafts included. A chunk that consists of only a prompt's last token
    /// counts as a decode.
    pub per_decode_us: f64,
    /// The cost per thousand pairs of a token and a position that it attends to.
    pub per_attended_kilotoken_us: f64,
}

impl CostModel {
    /// Steps that all take equally long.
    pub fn per_step(micros: f64) -> Self {
        Self {
            per_step_us: micros,
            per_token_us: 0.0,
            per_decode_us: 0.0,
            per_attended_kilotoken_us: 0.0,
        }
    }

    /// The duration of a batch; 0 for an empty one.
    pub fn step_duration(&self, batch: &Batch) -> Duration {
        if batch.is_empty() {
            return Duration::ZERO;
        }
        let attended: u64 = batch
            .spans
            .iter()
            .map(|span| {
                let len = u64::from(span.tokens.end - span.tokens.start);
                len * u64::from(span.start) + len * (len + 1) / 2
            })
            .sum();
        let num_tokens = |span: &Span| u64::from(span.tokens.end - span.tokens.start);
        let is_decode = |span: &&Span| num_tokens(span) == 1 + u64::from(span.num_drafts);
        let num_decode_tokens: u64 = batch.spans.iter().filter(is_decode).map(num_tokens).sum();
        let num_prompt_tokens = batch.num_tokens() as u64 - num_decode_tokens;
        let micros = self.per_step_us
            + self.per_token_us * num_prompt_tokens as f64
            + self.per_decode_us * num_decode_tokens as f64
            + self.per_attended_kilotoken_us * attended as f64 / 1000.0;
        Duration::from_secs_f64(micros.max(0.0) * 1e-6)
    }
}

#[cfg(test)]
mod tests {
    use corella_core::{InputToken, SlotId, Yield};

    use super::*;

    #[test]
    fn a_step_costs_its_parts() {
        let cost = CostModel {
            per_step_us: 100.0,
            per_token_us: 10.0,
            per_decode_us: 500.0,
            per_attended_kilotoken_us: 1000.0,
        };
        assert_eq!(cost.step_duration(&Batch::default()), Duration::ZERO);
        let span = |slot, start, tokens| Span {
            slot: SlotId(slot),
            start,
            tokens,
            yields: Yield::Draw,
            num_drafts: 0,
        };
        // Positions 0..3 attend to 1 + 2 + 3 tokens, position 9 attends to 10.
        let mut batch = Batch {
            spans: vec![span(0, 0, 0..3), span(1, 9, 3..4)],
            tokens: vec![InputToken::Known(0); 4],
            ..Batch::default()
        };
        assert_eq!(
            cost.step_duration(&batch),
            Duration::from_micros(100 + 30 + 500 + 16)
        );
        // Two drafts are checked after position 9, and attend to 11 + 12 tokens.
        batch.spans[1].tokens.end = 6;
        batch.spans[1].num_drafts = 2;
        batch.tokens = vec![InputToken::Known(0); 6];
        assert_eq!(
            cost.step_duration(&batch),
            Duration::from_micros(100 + 30 + 1500 + 39)
        );
    }
}
