//! A compiled grammar as a constraint for the engine, which knows tokens and no text.

use std::sync::{Arc, OnceLock};

use corella_core::TokenId;
use corella_engine::{Allowed, ConstrainedAnswer, ConstraintMaker, TokenConstraint};
use corella_text::{Grammar, GrammarCompiler, GrammarState, Tokenizer};

/// Constrains answers to a grammar.
#[derive(Debug)]
pub struct GrammarConstraint(pub Grammar);

/// Compiles, for one vocabulary, grammars from other nodes with the same tokenizer.
pub struct GrammarMaker {
    tokenizer: Tokenizer,
    vocab_size: usize,
    /// The compiler. It is made for the first request that needs it, because reading the vocabulary takes time.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
}

struct GrammarAnswer(GrammarState);

impl GrammarMaker {
    pub fn new(tokenizer: Tokenizer, vocab_size: usize) -> Self {
        Self {
            tokenizer,
            vocab_size,
            grammars: OnceLock::new(),
        }
    }
}

impl ConstraintMaker for GrammarMaker {
    fn make(&self, source: &str) -> Result<Arc<dyn TokenConstraint>, String> {
        let new = || GrammarCompiler::new(&self.tokenizer, self.vocab_size);
        let grammars = self.grammars.get_or_init(new).as_ref();
        let grammar = grammars?.compile_again(source);
        let grammar = grammar.map_err(|error| error.to_string())?;
        Ok(Arc::new(GrammarConstraint(grammar)))
    }
}

impl TokenConstraint for GrammarConstraint {
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String> {
        Ok(Box::new(GrammarAnswer(self.0.start())))
    }

    fn source(&self) -> Option<Arc<str>> {
        Some(self.0.source().clone())
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

#[cfg(test)]
mod tests;
