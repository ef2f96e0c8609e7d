//! The requests that can run to their end under the limits of a configuration.

use crate::{AdmissionError, Request, SchedulerConfig};

impl SchedulerConfig {
    /// Returns the largest number of tokens that the request may generate, or the reason why it can never run to its
    /// end.
    pub fn check_request(&self, request: &Request) -> Result<u32, AdmissionError> {
        let num_prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        if num_prompt_tokens == 0 {
            return Err(AdmissionError::EmptyPrompt);
        }
        let is_pooled = request.sampling.pooling.is_some();
        let asked = match is_pooled {
            true => Some(0),
            false => request.stopping.max_tokens,
        };
        let is_scored = request.sampling.prompt_logprobs.is_some();
        if asked == Some(0) && !is_scored && !is_pooled {
            return Err(AdmissionError::ZeroMaxTokens);
        }
        let num_output_tokens = request.output.len() as u32;
        let is_complete = |max_tokens| num_output_tokens >= max_tokens && num_output_tokens > 0;
        if asked.is_some_and(is_complete) {
            return Err(AdmissionError::OutputComplete {
                num_output_tokens,
                max_tokens: asked.unwrap_or_default(),
            });
        }
        let max_tokens = asked.unwrap_or(num_output_tokens + 1);
        let num_tokens = u64::from(num_prompt_tokens) + u64::from(max_tokens);
        if num_tokens > u64::from(self.max_model_len) {
            return Err(AdmissionError::ContextExceeded {
                num_prompt_tokens,
                max_tokens,
                max_model_len: self.max_model_len,
            });
        }
        let needed_pages = self.num_least_pages(num_tokens as u32);
        let num_pages = self.num_unpinned_pages();
        if needed_pages > num_pages {
            return Err(AdmissionError::PoolExceeded {
                num_prompt_tokens,
                max_tokens,
                needed_pages,
                num_pages,
            });
        }
        let step_limit = self.max_unchunked_tokens();
        // The last token takes no row, unless it is the last token of a prompt after which nothing is drawn.
        let num_rows = (num_tokens - 1).max(num_prompt_tokens.into());
        if num_rows > u64::from(step_limit) {
            return Err(AdmissionError::StepExceeded {
                num_prompt_tokens,
                max_tokens,
                limit: step_limit,
            });
        }
        let max_len = u64::from(self.max_len_in(num_pages))
            .min(self.max_model_len.into())
            .min(u64::from(step_limit) + 1);
        Ok(asked.unwrap_or((max_len - u64::from(num_prompt_tokens)) as u32))
    }

    /// The longest prefill that fits into one step beside all decodes when prompts are not chunked.
    /// It also bounds a preempted request, which prefills its output again.
    pub(crate) fn max_unchunked_tokens(&self) -> u32 {
        if self.enable_chunked_prefill {
            return u32::MAX;
        }
        self.max_num_batched_tokens - self.max_other_decodes()
    }

    /// The most decodes in a step in which another request prefills.
    pub(crate) fn max_other_decodes(&self) -> u32 {
        self.max_decode_seqs.min(self.max_num_seqs - 1)
    }
}
