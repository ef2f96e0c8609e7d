//! Errors of schemas, with their place.

use crate::GrammarError;

/// A caller's own text in an error.
pub fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

pub fn error(place: &[String], reason: String) -> GrammarError {
    GrammarError {
        place: place.join("."),
        ..GrammarError::at_root(reason)
    }
}
