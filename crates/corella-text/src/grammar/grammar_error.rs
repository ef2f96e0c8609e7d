//! The errors of grammars.

use std::fmt;

/// The reason for which a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarError {
    /// The place in a JSON schema, as a path of keys (`properties.age`). Empty for the root of the schema, and for
    /// other kinds of grammars: their reason names line and column where known.
    pub place: String,
    pub reason: String,
    /// The index of the wrong part of a composed grammar, if the error lies in a single part.
    pub(crate) part: Option<usize>,
}

impl GrammarError {
    pub(crate) fn at_root(reason: String) -> Self {
        Self {
            place: String::new(),
            reason,
            part: None,
        }
    }
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place.is_empty() {
            true => f.write_str(&self.reason),
            false => write!(f, "at {}: {}", self.place, self.reason),
        }
    }
}

impl std::error::Error for GrammarError {}
