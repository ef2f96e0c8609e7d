//! Hidden states of prompts: rows behind the final norm, the last one or the mean of all.

use corella_core::{BatchOutput, Pooling};

use super::Stage;
use super::scoring::Unscored;
use crate::step::layout::StepPool;

impl Stage {
    /// Adds the hidden states that spans yield to a step's output, and the others to the sums of their
    /// slots. Returns the spans that get none.
    pub(super) fn pool_hidden_states(
        &mut self,
        pooled: &[StepPool],
        output: &mut BatchOutput,
    ) -> Result<Vec<Unscored>, String> {
        let mut missing = Vec::new();
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
            let is_finite = |value: &f32| value.is_finite();
            let reason = match pooled {
                Some(pooled) if pooled.iter().all(is_finite) => {
                    output.hidden_states.push((span.slot, pooled));
                    continue;
                }
                Some(_) => "it has values that are infinite or no numbers",
                None => "a step that computed a part of it has failed",
            };
            missing.push(Unscored {
                row: span.rows.start,
                slot: span.slot,
                reason: String::from(reason),
            });
        }
        Ok(missing)
    }
}
