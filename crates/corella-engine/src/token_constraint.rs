//! What an answer may be, told token by token by whoever knows: the engine sees only ids.

use std::fmt;
use std::sync::Arc;

use corella_core::TokenId;

/// A constraint on whole answers, for example that they are JSON. Each choice of a request starts
/// from it anew.
pub trait TokenConstraint: fmt::Debug + Send + Sync {
    /// The beginning of an answer. It is called on the thread that makes masks.
    ///
    /// # Errors
    /// Why there is none. The request ends with that.
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String>;

    /// What a [`ConstraintMaker`] of another node makes the same constraint of. `None` if it stays on its node.
    fn source(&self) -> Option<Arc<str>> {
        None
    }
}

/// Makes constraints of what another node says of them.
pub trait ConstraintMaker: Send + Sync {
    /// May take a tenth of a second.
    ///
    /// # Errors
    /// Why this node cannot hold an answer to it.
    fn make(&self, source: &str) -> Result<Arc<dyn TokenConstraint>, String>;
}

/// One answer, as far as it has come. An error or a panic in it ends its request alone. Whoever
/// implements it limits its time: a step waits for the masks of all its requests.
pub trait ConstrainedAnswer: Send {
    /// Takes the next token. It is one of those that were allowed, unless it was drawn elsewhere.
    ///
    /// # Errors
    /// Why the answer cannot go on with it.
    fn push(&mut self, token: TokenId) -> Result<(), String>;

    /// What may come next.
    ///
    /// # Errors
    /// Why that cannot be said.
    fn allowed(&mut self) -> Result<Allowed, String>;
}

/// What may come next in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The tokens that may: bit `t % 32` of word `t / 32`. Tokens behind the last word may not.
    pub tokens: Box<[u32]>,
    /// Whether the answer may end here. Then the request's end and stop tokens are allowed as well,
    /// and if no other token is, it ends at once.
    pub may_end: bool,
}
