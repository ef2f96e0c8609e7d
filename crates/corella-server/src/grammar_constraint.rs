//! A compiled grammar as the engine takes it: without a word of text.

use corella_core::TokenId;
use corella_engine::{Allowed, ConstrainedAnswer, TokenConstraint};
use corella_text::{Grammar, GrammarState};

/// Holds answers to a grammar.
#[derive(Debug)]
pub struct GrammarConstraint(pub Grammar);

struct GrammarAnswer(GrammarState);

impl TokenConstraint for GrammarConstraint {
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String> {
        Ok(Box::new(GrammarAnswer(self.0.start())))
    }
}

impl ConstrainedAnswer for GrammarAnswer {
    fn push(&mut self, token: TokenId) -> Result<(), String> {
        self.0.push(token)
    }

    fn allowed(&mut self) -> Result<Allowed, String> {
        Ok(Allowed {
            tokens: self.0.allowed()?,
            may_end: self.0.may_end()?,
        })
    }
}
