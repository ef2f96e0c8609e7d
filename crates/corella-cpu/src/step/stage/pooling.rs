//! Hidden states of prompts: rows behind the final norm, the last one or the mean of all.

use corella_core::Pooling;
use corella_model::{StepOutput, StepPool};

use super::Stage;

impl Stage {
    /// Adds the hidden states that spans yield to a step's output, and the others to the sums of their
    /// slots.
    pub(super) fn pool_hidden_states(
        &mut self,
        pooled: &[StepPool],
        output: &mut StepOutput,
    ) -> Result<(), String> {
        let mut state = vec![0.0; self.forward.spec().hidden_size];
        for span in pooled {
            let slot = self.slots.get_mut(span.slot)?;
            let is_summed = span.yields != Some(Pooling::LastToken);
            for (row, position) in span.rows.clone().zip(span.position..) {
                self.forward.hidden_state(row, &mut state);
                if is_summed {
                    slot.mean.add(position, &state);
                }
            }
            let pooled = match span.yields {
                None => continue,
                Some(Pooling::LastToken) => Some(state[..].into()),
                Some(Pooling::Mean) => slot.mean.mean(span.position + span.rows.len()),
            };
            output.add_hidden_state(span, pooled);
        }
        Ok(())
    }
}
