//! Log-probabilities of prompts: rows of logits that no token is drawn from.

use corella_core::{BatchOutput, SlotId};
use corella_model::score;

use super::{Stage, Worker, on_rows};
use crate::step::layout::StepScore;

/// A span whose logits are not numbers: a row of it, its slot and the reason.
pub struct Unscored {
    pub row: usize,
    pub slot: SlotId,
    pub reason: String,
}

impl Stage {
    /// Adds the log-probabilities that spans yield to a step's output. Their logits are computed block
    /// by block, like those of draws. Returns the spans that get none.
    pub(super) fn score(
        &mut self,
        scores: &[StepScore],
        output: &mut BatchOutput,
    ) -> Result<Vec<Unscored>, String> {
        let mut unscored: Vec<Unscored> = Vec::new();
        for block in scores.chunks(self.forward.logit_rows()) {
            let rows: Vec<usize> = block.iter().map(|score| score.row).collect();
            self.compute_logits(&rows)?;
            let forward = &self.forward;
            let score_row = |_: &Worker<'_>, index: usize| {
                let StepScore { token, num_top, .. } = block[index];
                // SAFETY: each index is scored by one worker.
                let logits = unsafe { forward.logits_mut(index) };
                score(logits, token, num_top).map_err(|error| error.to_string())
            };
            let is_prefill = self.plan.is_prefill();
            let scored = on_rows(&mut self.pool, forward, is_prefill, block.len(), score_row)?;
            for (&StepScore { slot, row, .. }, scored) in block.iter().zip(scored) {
                let logprob = match scored {
                    Ok(logprob) => logprob,
                    Err(reason) => {
                        unscored.push(Unscored { row, slot, reason });
                        continue;
                    }
                };
                match output.logprobs.last_mut().filter(|(last, _)| *last == slot) {
                    Some((_, logprobs)) => logprobs.push(logprob),
                    None => output.logprobs.push((slot, vec![logprob])),
                }
            }
        }
        Ok(unscored)
    }
}
