//! Tokens from any source: this engine, or a pair of nodes.

use crate::engine::Engine;
use crate::request::submission::Submission;
use crate::request::token_stream::TokenStream;
use crate::state::engine_error::SubmitError;

/// Takes submissions and generates tokens. A server knows only this interface of the source of tokens.
pub trait Generate: Send + Sync {
    /// Returns a stream for each choice: all of them or none. Never blocks.
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError>;

    /// Checks a submission against the fixed limits, without submitting it. A source without such limits refuses none.
    fn check(&self, _: Submission) -> Result<(), SubmitError> {
        Ok(())
    }
}

impl Generate for Engine {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.submit(submission)
    }

    fn check(&self, submission: Submission) -> Result<(), SubmitError> {
        self.check(submission)
    }
}
