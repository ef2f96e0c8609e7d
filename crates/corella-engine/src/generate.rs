//! Tokens from any source: this engine, or a pair of nodes.

use crate::engine::Engine;
use crate::request::submission::Submission;
use crate::request::token_stream::TokenStream;
use crate::state::engine_error::SubmitError;

/// Takes submissions and generates tokens. A server knows only this interface of the source of tokens.
pub trait Generate: Send + Sync {
    /// Returns a stream for each choice: all of them or none. Never blocks.
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError>;
}

impl Generate for Engine {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.submit(submission)
    }
}
