//! Log-probabilities of prompts: rows of logits without a draw.

use corella_model::{StepOutput, StepScore, score};

use super::{Stage, Worker, on_rows};

impl Stage {
    /// Adds the log-probabilities of spans to a step's output. The logits are computed block by block, as for draws.
    pub(super) fn score(
        &mut self,
        scores: &[StepScore],
        output: &mut StepOutput,
    ) -> Result<(), String> {
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
            for (place, scored) in block.iter().zip(scored) {
                output.add_score(place, scored);
            }
        }
        Ok(())
    }
}
