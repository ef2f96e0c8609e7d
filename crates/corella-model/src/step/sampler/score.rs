//! The probability of a known token, for log-probabilities of prompts.

use corella_core::{PromptLogprob, TokenId};

use super::{SampleError, finite_max, log_probabilities};

/// Gives the log-probability of `token` from the logits of the position before it, and the `num_top` most likely tokens
/// there. Masks, penalties and temperature do not apply.
pub fn score(logits: &[f32], token: TokenId, num_top: usize) -> Result<PromptLogprob, SampleError> {
    let max = finite_max(logits)?;
    Ok(PromptLogprob {
        token,
        logprobs: log_probabilities(logits, max, token, num_top),
    })
}
