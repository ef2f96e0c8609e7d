//! Refuses requests that leave no token to draw at the start. If no token is left later, the request ends with an
//! error.

use corella_core::TokenId;
use corella_engine::Allowed;

use crate::text::sampling_fields::GenerationParams;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;

impl GenerationParams {
    /// Checks that the answer can begin: the constraint on the answer and the rules about single tokens must allow a
    /// token that `min_tokens` does not exclude.
    pub fn check_first_token(&self, served: &ServedModel) -> Result<(), ApiError> {
        if !self.drawn.is_empty() {
            return self.check_drawn_format();
        }
        let rules = self.sampling.rules.as_deref();
        let ends = |token: TokenId| {
            self.stopping.end_token_ids.contains(&token)
                || self.stopping.stop_token_ids.contains(&token)
        };
        let holds_ends_back = self.stopping.min_tokens > 0;
        if rules.is_none() && !(holds_ends_back && self.constraint.is_some()) {
            return Ok(());
        }
        let first = self
            .constraint
            .as_ref()
            .map(|constraint| constraint.start()?.allowed())
            .transpose();
        let first = first.map_err(ApiError::grammar_failed)?;
        let is_allowed = |token: TokenId| match &first {
            None => true,
            Some(Allowed { tokens, may_end }) => {
                let word = tokens.get(token as usize / 32).copied().unwrap_or(0);
                word >> (token % 32) & 1 == 1 || *may_end && ends(token)
            }
        };
        if first
            .as_ref()
            .is_some_and(|first| first.may_end && first.tokens.iter().all(|&word| word == 0))
        {
            return Ok(());
        }
        let is_banned = |token| {
            rules.is_some_and(|rules| rules.banned_after(&[]).any(|banned| banned == token))
        };
        let is_left = |token: TokenId| {
            is_allowed(token) && !is_banned(token) && !(holds_ends_back && ends(token))
        };
        let allowed = rules.and_then(|rules| rules.allowed());
        let is_something_left = match allowed {
            Some(allowed) => allowed.iter().copied().any(is_left),
            None => (0..served.config.vocab_size as TokenId).any(is_left),
        };
        let has_banned = rules.is_some_and(|rules| !rules.banned().is_empty());
        let (field, others) = match (allowed.is_some(), has_banned) {
            _ if is_something_left => return Ok(()),
            (true, true) => ("allowed_token_ids", "bad_words, "),
            (true, false) => ("allowed_token_ids", ""),
            (false, true) => ("bad_words", ""),
            (false, false) => ("min_tokens", ""),
        };
        let message = format!(
            "leaves no token for the beginning of the answer, together with {others}the answer's format and \
             the tokens that min_tokens excludes"
        );
        Err(ApiError::invalid(field, message))
    }
}
