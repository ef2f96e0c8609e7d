//! The normalizer of a tokenizer, which changes a text before it is split. Only kinds that need little memory are
//! supported.
//!
//! The `tokenizers` crate also records the origin of each byte. That takes sixteen bytes for each byte, and is not
//! needed here.

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer as _};

/// A normalizer: its steps, in order.
pub(crate) struct Normalizer {
    steps: Vec<Step>,
}

enum Step {
    Prepend(String),
    Replace { pattern: String, content: String },
    Nfc,
}

/// The approximate number of bytes that are normalised at once.
const CHUNK_BYTES: usize = 4096;

impl Normalizer {
    /// Reads a normalizer of tokenizer.json. `None` if its kind is not supported.
    pub(crate) fn new(json: &Value) -> Option<Self> {
        let mut steps = Vec::new();
        append_steps(json, &mut steps)?;
        Some(Self { steps })
    }

    pub(crate) fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut text = Cow::Borrowed(text);
        for step in &self.steps {
            match step {
                Step::Prepend(_) if text.is_empty() => {}
                Step::Prepend(prefix) => text = Cow::Owned(format!("{prefix}{text}")),
                Step::Replace { pattern, content } if text.contains(pattern.as_str()) => {
                    text = Cow::Owned(text.replace(pattern, content));
                }
                Step::Replace { .. } => {}
                Step::Nfc if text.is_ascii() => {}
                Step::Nfc => text = Cow::Owned(nfc(&text)),
            }
        }
        text
    }
}

fn append_steps(json: &Value, steps: &mut Vec<Step>) -> Option<()> {
    match json["type"].as_str() {
        None if json.is_null() => {}
        Some("Sequence") => {
            for nested in json["normalizers"].as_array()? {
                append_steps(nested, steps)?;
            }
        }
        Some("NFC") => steps.push(Step::Nfc),
        Some("Prepend") => steps.push(Step::Prepend(json["prepend"].as_str()?.to_owned())),
        Some("Replace") => steps.push(Step::Replace {
            pattern: non_empty(&json["pattern"]["String"])?,
            content: json["content"].as_str()?.to_owned(),
        }),
        _ => return None,
    }
    Some(())
}

fn non_empty(json: &Value) -> Option<String> {
    json.as_str()
        .filter(|text| !text.is_empty())
        .map(str::to_owned)
}

/// Normalises to NFC chunk by chunk. The text may be cut before an ASCII character or a CJK ideograph: neither changes
/// or composes with a preceding character.
fn nfc(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let may_cut = |&(at, c): &(usize, char)| {
            at >= CHUNK_BYTES && (c.is_ascii() || ('\u{4E00}'..='\u{9FFF}').contains(&c))
        };
        let end = rest.char_indices().find(may_cut);
        let (chunk, behind) = rest.split_at(end.map_or(rest.len(), |(at, _)| at));
        let mut normalized = NormalizedString::from(chunk);
        // NFC accepts any text, so the result can be ignored.
        let _ = tokenizers::normalizers::NFC.normalize(&mut normalized);
        out.push_str(normalized.get());
        rest = behind;
    }
    out
}

/// The largest number of bytes of a text that can become one byte of its normalised form. `None` if unlimited or
/// unknown.
pub(crate) fn max_shrinkage(json: &Value) -> Option<usize> {
    match json["type"].as_str() {
        None if json.is_null() => Some(1),
        Some("Sequence") => json["normalizers"]
            .as_array()?
            .iter()
            .map(max_shrinkage)
            .product(),
        // U+1FBE U+0308 U+0301 are seven bytes and compose to U+0390, which is two bytes. No other
        // character shrinks by a larger factor.
        Some("NFC") => Some(4),
        Some("Prepend" | "ByteLevel") => Some(1),
        Some("Replace") => {
            let pattern = non_empty(&json["pattern"]["String"])?;
            let content = non_empty(&json["content"])?;
            Some(pattern.len().div_ceil(content.len()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The result of normalising the whole text at once.
    fn reference(text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        tokenizers::normalizers::NFC
            .normalize(&mut normalized)
            .expect("NFC refused a text");
        normalized.get().to_owned()
    }

    #[test]
    fn chunks_compose_as_the_whole() {
        let parts = [
            "e\u{301}",
            "\u{1112}\u{1161}\u{11AB}",
            "a\u{328}\u{301}",
            "漢",
            "x",
            "\u{212B}",
            "q\u{307}\u{323}",
            "\u{1FBE}\u{308}\u{301}",
            "ひ\u{3099}",
            "\n",
            "ÄÖ",
        ];
        let nfc = Normalizer::new(&json!({"type": "NFC"})).expect("NFC is not known");
        // Each stride makes the chunks end elsewhere.
        for stride in 1..parts.len() {
            let text: String = (0..4000).map(|i| parts[i * stride % parts.len()]).collect();
            assert!(text.len() > 2 * CHUNK_BYTES);
            assert_eq!(nfc.normalize(&text), reference(&text));
        }
    }

    /// No text shrinks by more than the stated factor.
    #[test]
    fn no_character_shrinks_by_more() {
        let bound = max_shrinkage(&json!({"type": "NFC"})).expect("NFC is not known");
        let longest = "\u{1FBE}\u{308}\u{301}".repeat(10);
        assert!(longest.len() > (bound - 1) * reference(&longest).len());
        assert!(longest.len() <= bound * reference(&longest).len());
        let tags = json!({
            "type": "Replace", "pattern": {"String": "<tag>"}, "content": "\u{2581}",
        });
        assert_eq!(max_shrinkage(&tags), Some(2));
        let removed = json!({"type": "Replace", "pattern": {"String": "x"}, "content": ""});
        assert_eq!(max_shrinkage(&removed), None);
    }
}
