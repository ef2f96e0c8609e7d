//! Assembles the result of a step from the draws, scores and hidden states of its rows.

use corella_core::{BatchOutput, HiddenState, PromptLogprob, Sample, SlotId, StepId, TokenId};

use crate::step::step_rows::{StepPool, StepSample, StepScore};

/// The output of a step during assembly: scores and hidden states first, then draws, each in the order of the step's
/// rows.
pub struct StepOutput {
    output: BatchOutput,
    missing: Vec<Missing>,
    /// The number of spans among `missing` that lack a score or a hidden state. Draws of their slots are not reported.
    num_unscored: usize,
    /// The last drawn token that counts; `None` if no further draw of the span can count.
    last_drawn: Option<TokenId>,
}

/// A span with an incomplete result.
struct Missing {
    row: usize,
    slot: SlotId,
    reason: String,
}

/// The token in place of one that could not be drawn. A step that was planned ahead may compute this token, although
/// its request ends.
pub const NOTHING_DRAWN: TokenId = 0;

impl StepOutput {
    pub fn new(step: StepId, num_samples: usize) -> Self {
        Self {
            output: BatchOutput {
                step,
                samples: Vec::with_capacity(num_samples),
                ..BatchOutput::default()
            },
            missing: Vec::new(),
            num_unscored: 0,
            last_drawn: None,
        }
    }

    /// Adds the log-probability of a prompt's token, or the reason for its absence.
    pub fn add_score(&mut self, score: &StepScore, scored: Result<PromptLogprob, String>) {
        let slot = score.slot;
        match scored {
            Err(reason) => self.add_missing(score.row, slot, reason),
            Ok(logprob) => {
                let lists = &mut self.output.logprobs;
                match lists.last_mut().filter(|(last, _)| *last == slot) {
                    Some((_, logprobs)) => logprobs.push(logprob),
                    None => lists.push((slot, vec![logprob])),
                }
            }
        }
    }

    /// Adds the hidden state of a span. `None` if a step that computed a part of it has failed.
    pub fn add_hidden_state(&mut self, span: &StepPool, state: Option<HiddenState>) {
        let reason = match state {
            Some(state) if state.iter().all(|value| value.is_finite()) => {
                self.output.hidden_states.push((span.slot, state));
                return;
            }
            Some(_) => "it has values that are infinite or no numbers",
            None => "a step that computed a part of it has failed",
        };
        self.add_missing(span.rows.start, span.slot, String::from(reason));
    }

    fn add_missing(&mut self, row: usize, slot: SlotId, reason: String) {
        self.missing.push(Missing { row, slot, reason });
        self.num_unscored = self.missing.len();
    }

    /// Adds a draw. A mask ends the draws of its span. Returns the token that the slot has drawn; `None` if the draw
    /// does not count, because a draft before it was not drawn.
    pub fn add_draw(
        &mut self,
        place: &StepSample,
        drawn: Result<Sample, String>,
        is_masked: bool,
    ) -> Option<TokenId> {
        if place.draft.is_some() && place.draft != self.last_drawn {
            self.last_drawn = None;
            return None;
        }
        let token = drawn.as_ref().ok().map(|sample| sample.token);
        self.last_drawn = token.filter(|_| !is_masked);
        let (slot, row) = (place.slot, place.row);
        let unscored = &self.missing[..self.num_unscored];
        match drawn {
            _ if unscored.iter().any(|span| span.slot == slot) => {}
            Ok(sample) => self.output.samples.push((slot, sample)),
            Err(_) if place.draft.is_some() => {}
            Err(reason) => self.missing.push(Missing { row, slot, reason }),
        }
        Some(token.unwrap_or(NOTHING_DRAWN))
    }

    pub fn finish(self) -> BatchOutput {
        let Self {
            mut output,
            mut missing,
            ..
        } = self;
        missing.sort_by_key(|span| span.row);
        missing.dedup_by_key(|span| span.slot);
        let is_whole = |slot: SlotId| missing.iter().all(|span| span.slot != slot);
        output.logprobs.retain(|&(slot, _)| is_whole(slot));
        let undrawn = missing.into_iter();
        output.undrawn = undrawn
            .map(|span| (span.slot, span.reason.into()))
            .collect();
        output
    }
}

#[cfg(test)]
mod tests {
    use corella_core::Logprobs;

    use super::*;

    /// The draws of a span's rows, its drafts, whether it is masked, and its expected result.
    type Span = (
        Vec<Result<TokenId, &'static str>>,
        Vec<TokenId>,
        bool,
        Result<Vec<TokenId>, &'static str>,
    );

    fn sample(token: TokenId) -> Sample {
        Sample {
            token,
            logprobs: None,
        }
    }

    fn drawn(drawn: Result<TokenId, &str>) -> Result<Sample, String> {
        drawn.map(sample).map_err(String::from)
    }

    #[test]
    fn drafts_count_while_they_are_what_was_drawn() {
        let spans: [Span; 7] = [
            (
                vec![Ok(5), Ok(6), Ok(7)],
                vec![5, 6],
                false,
                Ok(vec![5, 6, 7]),
            ),
            (vec![Ok(5), Ok(6), Ok(7)], vec![5, 9], false, Ok(vec![5, 6])),
            (vec![Ok(5), Ok(6), Ok(6)], vec![6, 6], false, Ok(vec![5])),
            (vec![Ok(5), Ok(6)], vec![5], true, Ok(vec![5])),
            (vec![Ok(8)], vec![], false, Ok(vec![8])),
            (
                vec![Ok(5), Err("NaN"), Ok(6)],
                vec![5, 0],
                false,
                Ok(vec![5]),
            ),
            (vec![Err("NaN"), Ok(6)], vec![0], false, Err("NaN")),
        ];
        let mut output = StepOutput::new(StepId(3), 0);
        let mut row = 0;
        for (slot, (draws, drafts, is_masked, _)) in spans.iter().enumerate() {
            for (i, &token) in draws.iter().enumerate() {
                let place = StepSample {
                    slot: SlotId(slot as u32),
                    row,
                    num_tokens: 1 + i,
                    draft: i.checked_sub(1).map(|i| drafts[i]),
                };
                output.add_draw(&place, drawn(token), *is_masked);
                row += 1;
            }
        }
        let output = output.finish();
        assert_eq!(output.step, StepId(3));
        for (slot, (_, _, _, expected)) in spans.iter().enumerate() {
            let slot = SlotId(slot as u32);
            let samples = output.samples.iter().filter(|sample| sample.0 == slot);
            let tokens: Vec<TokenId> = samples.map(|(_, sample)| sample.token).collect();
            let undrawn = output.undrawn.iter().filter(|span| span.0 == slot);
            let reasons: Vec<&str> = undrawn.map(|(_, reason)| &**reason).collect();
            match expected {
                Ok(expected) => assert_eq!((&tokens, reasons.len()), (expected, 0)),
                Err(reason) => assert_eq!((tokens.len(), reasons), (0, vec![*reason])),
            }
        }
    }

    #[test]
    fn scores_of_a_span_are_all_or_none() {
        let logprob = |token| PromptLogprob {
            token,
            logprobs: Logprobs {
                token: -0.5,
                rank: 1,
                top: [].into(),
            },
        };
        let mut output = StepOutput::new(StepId(0), 2);
        for slot in 0..2 {
            for row in 0..2 {
                let score = StepScore {
                    slot: SlotId(slot),
                    row: 2 * slot as usize + row,
                    token: row as TokenId,
                    num_top: 0,
                };
                let is_bad = (slot, row) == (1, 1);
                let scored = if is_bad {
                    Err("NaN".into())
                } else {
                    Ok(logprob(score.token))
                };
                output.add_score(&score, scored);
            }
        }
        for slot in 0..2 {
            let place = StepSample {
                slot: SlotId(slot),
                row: 4 + slot as usize,
                num_tokens: 2,
                draft: None,
            };
            output.add_draw(&place, drawn(Ok(7)), false);
        }
        let output = output.finish();
        assert_eq!(output.samples, [(SlotId(0), sample(7))]);
        assert_eq!(output.logprobs, [(SlotId(0), vec![logprob(0), logprob(1)])]);
        assert_eq!(output.undrawn.len(), 1);
        assert_eq!(output.undrawn[0].0, SlotId(1));
    }
}
