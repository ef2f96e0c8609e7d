//! Hidden states of prompts, after the final norm: all rows, one row, or the mean or the largest values of all rows.

use corella_core::Pooling;
use corella_model::{SpanPool, StepOutput, StepPool};

use super::Stage;

impl Stage {
    /// Adds the hidden states of spans to a step's output. Rows that count for a mean are added to the sums of their
    /// slots first.
    pub(super) fn pool_hidden_states(
        &mut self,
        pooled: &[StepPool],
        output: &mut StepOutput,
    ) -> Result<(), String> {
        let mut state = vec![0.0; self.forward.spec().hidden_size];
        for span in pooled {
            let slot = self.slots.get_mut(span.slot)?;
            let pooling = span.yields.unwrap_or(Pooling::Mean);
            let mut pool = SpanPool::new(pooling);
            for (row, position) in span.rows.clone().zip(span.position..) {
                self.forward.hidden_state(row, &mut state);
                match pooling {
                    Pooling::Mean => slot.mean.add(position, &state),
                    _ => pool.add(position, &state),
                }
            }
            let pooled = match span.yields {
                None => continue,
                Some(Pooling::Mean) => slot.mean.mean(span.position + span.rows.len()),
                Some(_) => pool.pooled(),
            };
            output.add_hidden_state(span, pooled);
        }
        Ok(())
    }
}
