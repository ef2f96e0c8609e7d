//! A caller's JSON schema, said in the keywords that llguidance follows.

mod closed_object;
mod look_around;
mod reference_cycle;
mod rewrite;

use serde_json::Value;

pub(crate) use self::look_around::LOOK_AROUND;
use crate::GrammarError;

/// The schema as it is compiled. It allows the same answers, or fewer: objects have no members that it does not
/// name, unless it speaks of others, and a look-ahead may be said without one.
///
/// # Errors
/// A reference that leads back to itself, or a pattern that cannot be said otherwise.
pub(crate) fn compiled_schema(schema: &Value) -> Result<Value, GrammarError> {
    reference_cycle::check(schema)?;
    rewrite::rewritten(schema).map(closed_object::closed)
}

fn error(place: &[String], reason: String) -> GrammarError {
    GrammarError {
        place: place.join("."),
        ..GrammarError::at_root(reason)
    }
}

#[cfg(test)]
mod tests;
