//! The constraints that callers may put on an answer.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::grammar::gbnf::is_gbnf;

/// A constraint on the whole text of an answer, in the caller's form.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Value),
    /// A regular expression for the whole text.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's notation, as llguidance reads it.
    Lark(String),
    /// A grammar in GBNF, the notation of llama.cpp and of vLLM's EBNF.
    Gbnf(String),
    /// Several grammars in one.
    Composed(ComposedGrammar),
}

impl GrammarSource {
    /// Returns a grammar in GBNF if a line of it defines a rule with `::=`, and else in Lark's notation.
    pub fn of_grammar(grammar: String) -> Self {
        match is_gbnf(&grammar) {
            true => Self::Gbnf(grammar),
            false => Self::Lark(grammar),
        }
    }
}

/// A grammar in Lark's notation that refers to others: `@part0` is the first of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ComposedGrammar {
    pub(crate) start: String,
    pub(crate) parts: Vec<GrammarSource>,
}

impl ComposedGrammar {
    pub(crate) fn part_name(part: usize) -> String {
        format!("part{part}")
    }
}
