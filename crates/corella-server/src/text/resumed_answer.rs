//! The tokens of an answer that another server has drawn. This server continues the answer after them.

use corella_core::{StoppingCriteria, TokenId};

use crate::config::serve_config::ServeConfig;
use crate::text::prompt_tokens::{check_num_tokens, check_token_ids};
use crate::text::sampling_fields::GenerationParams;
use crate::wire::api_error::ApiError;

/// The field with the drawn tokens.
pub const FIELD: &str = "resume_token_ids";

/// Checks the drawn tokens. `num_choices` is the request's number of choices for each prompt.
pub fn check_drawn(
    drawn: &[TokenId],
    num_choices: u32,
    stopping: &StoppingCriteria,
    config: &ServeConfig,
) -> Result<(), ApiError> {
    if drawn.is_empty() {
        return Ok(());
    }
    if num_choices > 1 {
        return Err(ApiError::invalid(FIELD, "is allowed with one choice only"));
    }
    check_num_tokens(FIELD, drawn.len(), config)?;
    check_token_ids(FIELD, drawn, config.vocab_size)?;
    let num_drawn = drawn.len() as u32;
    if let Some(most) = stopping.max_tokens.filter(|&most| num_drawn >= most) {
        let message = format!("has {num_drawn} tokens, and the answer ends after {most}");
        return Err(ApiError::invalid(FIELD, message));
    }
    let ends = |(at, &token): (usize, &TokenId)| {
        let num_tokens = at as u32 + 1;
        stopping
            .finish_reason(token, num_tokens, u32::MAX)
            .is_some()
    };
    match drawn.iter().enumerate().position(ends) {
        None => Ok(()),
        Some(at) => Err(ends_answer(at)),
    }
}

/// The token at `at` has ended the answer.
pub fn ends_answer(at: usize) -> ApiError {
    ApiError::invalid(format!("{FIELD}[{at}]"), "has ended the answer")
}

impl GenerationParams {
    /// Checks that the drawn tokens follow the answer's format.
    pub fn check_drawn_format(&self) -> Result<(), ApiError> {
        let Some(constraint) = &self.constraint else {
            return Ok(());
        };
        let mut answer = constraint.start().map_err(ApiError::grammar_failed)?;
        for (at, &token) in self.drawn.iter().enumerate() {
            answer.push(token).map_err(|reason| {
                let message = format!("does not follow the answer's format: {reason}");
                ApiError::invalid(format!("{FIELD}[{at}]"), message)
            })?;
        }
        Ok(())
    }

    /// Refuses an answer that has begun for more or less than one prompt.
    pub fn check_num_resumed(&self, num_prompts: usize) -> Result<(), ApiError> {
        match self.drawn.is_empty() || num_prompts == 1 {
            true => Ok(()),
            false => Err(ApiError::invalid(FIELD, "is allowed with one prompt only")),
        }
    }
}
