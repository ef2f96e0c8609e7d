//! Constraints on answers, token by token. They are implemented outside the engine, which sees only token ids.

use std::fmt;
use std::sync::Arc;

use corella_core::TokenId;

/// A constraint on whole answers, for example that they are JSON. Each choice of a request starts an answer of its own.
pub trait TokenConstraint: fmt::Debug + Send + Sync {
    /// The beginning of an answer. Called on the thread that makes masks.
    ///
    /// # Errors
    /// The reason for a failure. It ends the request.
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String>;

    /// The text from which a [`ConstraintMaker`] of another node makes the same constraint. `None` if it is local.
    fn source(&self) -> Option<Arc<str>> {
        None
    }
}

/// Makes constraints from another node's text.
pub trait ConstraintMaker: Send + Sync {
    /// Makes a constraint from its `source`. This may take a tenth of a second.
    ///
    /// # Errors
    /// The reason for which this node cannot apply the constraint.
    fn make(&self, source: &str) -> Result<Arc<dyn TokenConstraint>, String>;
}

/// One answer so far. An error or a panic in it ends its request alone. An implementation must limit the time of each
/// call, because a step waits for the masks of all its requests.
pub trait ConstrainedAnswer: Send {
    /// Takes the next token. It was allowed, unless it was drawn on another node.
    ///
    /// # Errors
    /// The reason why the answer cannot continue with this token.
    fn push(&mut self, token: TokenId) -> Result<(), String>;

    /// The tokens that may come next.
    ///
    /// # Errors
    /// The reason for a failure.
    fn allowed(&mut self) -> Result<Allowed, String>;
}

/// The tokens that may come next in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The allowed tokens: bit `t % 32` of word `t / 32`. Tokens after the last word are not allowed.
    pub tokens: Box<[u32]>,
    /// Whether the answer may end here. If so, the request's end and stop tokens are allowed as well. If no other token
    /// is allowed, the request ends at once.
    pub may_end: bool,
}
