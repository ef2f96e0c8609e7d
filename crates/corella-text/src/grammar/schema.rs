//! A caller's JSON schema in the keywords that llguidance follows.

mod closed_object;
mod decimal;
mod keyword_list;
mod look_around;
mod number;
mod reference_cycle;
mod rewrite;
mod schema_error;
mod size;

use serde_json::Value;

pub(crate) use self::look_around::LOOK_AROUND;
use crate::GrammarError;

/// The schema for compilation. It allows the same answers as the caller's schema, or fewer: objects have only the named
/// members unless the schema mentions others, and a look-ahead may be replaced.
///
/// # Errors
/// A reference that leads back to itself, or a pattern that cannot be rewritten.
pub(crate) fn compiled_schema(schema: &Value) -> Result<Value, GrammarError> {
    reference_cycle::check(schema)?;
    let schema = rewrite::rewritten(schema)?;
    size::check_merging(&schema)?;
    closed_object::closed(schema)
}

#[cfg(test)]
mod tests;
