//! The probability of a known token, for log-probabilities of prompts.

use corella_core::{PromptLogprob, TokenId};

use super::{SampleError, finite_max, log_probabilities};

/// Gives the log-probability of `token` from the logits of the position before it, and the `num_top` most likely tokens
/// there. Masks, penalties and temperature do not apply.
pub fn score(logits: &[f32], token: TokenId, num_top: usize) -> Result<PromptLogprob, SampleError> {
    let max = finite_max(logits)?;
    let (before, rest) = logits.split_at(token as usize);
    let own = rest[0];
    let num_before = before.iter().filter(|&&logit| logit >= own).count();
    let num_behind = rest.iter().filter(|&&logit| logit > own).count();
    Ok(PromptLogprob {
        token,
        rank: (1 + num_before + num_behind) as u32,
        logprobs: log_probabilities(logits, max, token, num_top),
    })
}
