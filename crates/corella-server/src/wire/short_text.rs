//! A text of an error. It is short even if it repeats the caller's value.

use std::ops::Deref;

use serde::Serialize;

/// Limits a caller's value in an error. Longer values are cut.
const MAX_VALUE_CHARS: usize = 200;
/// Limits the text. Errors without a caller's value are shorter. A longer text keeps its two ends, around the value.
const MAX_CHARS: usize = 600;

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ShortText(String);

impl From<String> for ShortText {
    fn from(text: String) -> Self {
        // A text of few bytes has few characters.
        if text.len() <= MAX_CHARS || text.chars().count() <= MAX_CHARS {
            return Self(text);
        }
        let start: String = text.chars().take(MAX_VALUE_CHARS).collect();
        let (end_at, _) = text
            .char_indices()
            .rev()
            .nth(MAX_VALUE_CHARS - 1)
            .unwrap_or_default();
        Self(format!("{start} … {}", &text[end_at..]))
    }
}

impl From<&str> for ShortText {
    fn from(text: &str) -> Self {
        Self::from(text.to_owned())
    }
}

impl Deref for ShortText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// Returns the beginning of a caller's value.
pub fn shown(value: &str) -> &str {
    let end = value.char_indices().nth(MAX_VALUE_CHARS);
    end.map_or(value, |(end, _)| &value[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_ends() {
        let short = "ü".repeat(MAX_CHARS);
        assert_eq!(&*ShortText::from(&*short), short);
        let text = format!("model: `{}` is not here", "ü".repeat(5_000_000));
        let cut = ShortText::from(text);
        assert!(cut.starts_with("model: `ü") && cut.ends_with("ü` is not here"));
        assert_eq!(cut.chars().count(), 2 * MAX_VALUE_CHARS + 3);
        assert_eq!(shown(&short), "ü".repeat(MAX_VALUE_CHARS));
        assert_eq!(shown("a"), "a");
    }
}
