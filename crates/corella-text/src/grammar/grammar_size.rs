//! Bounds of a grammar's source. Parsers of grammars recurse, and a class of Unicode's characters costs as much as
//! thousands of plain characters.

use std::collections::HashSet;

use serde_json::Value;

use crate::{GrammarError, GrammarSource};

/// The size of the largest grammar. llguidance also limits the cost of compiling: by the size of the compiled grammar,
/// and by steps of its lexer.
pub(crate) const MAX_SOURCE_BYTES: usize = 256 << 10;
/// The deepest nesting of brackets. Parsers of regular expressions and of Lark's notation recurse.
pub(crate) const MAX_NESTING: usize = 200;
/// The largest number of different classes with characters beyond ASCII.
const MAX_WIDE_CLASSES: usize = 300;

pub(crate) fn check_size(source: &GrammarSource) -> Result<(), GrammarError> {
    let mut size = Size::default();
    size.add(source);
    let reason = if size.num_bytes > MAX_SOURCE_BYTES {
        format!(
            "it has {} bytes, and at most {MAX_SOURCE_BYTES} are compiled",
            size.num_bytes
        )
    } else if size.nesting > MAX_NESTING {
        too_nested()
    } else if size.wide_classes.len() > MAX_WIDE_CLASSES {
        format!(
            "it has more than {MAX_WIDE_CLASSES} different classes of characters beyond ASCII, such as `\\w` and `\\p{{L}}`: \
             use fewer"
        )
    } else {
        return Ok(());
    };
    Err(GrammarError::at_root(reason))
}

/// The reason for which a regular expression is not compiled. Found before it is parsed.
pub(crate) fn nesting_error(regex: &str) -> Option<String> {
    (nesting(regex) > MAX_NESTING).then(too_nested)
}

fn too_nested() -> String {
    format!("its brackets are nested more than {MAX_NESTING} deep")
}

#[derive(Default)]
struct Size {
    num_bytes: usize,
    /// The nesting of brackets in the parsed parts.
    nesting: usize,
    wide_classes: HashSet<String>,
}

impl Size {
    fn add(&mut self, source: &GrammarSource) {
        match source {
            GrammarSource::JsonObject => {}
            GrammarSource::JsonSchema(schema) => {
                self.num_bytes += schema.to_string().len();
                self.add_patterns(schema);
            }
            GrammarSource::Regex(text) | GrammarSource::Lark(text) | GrammarSource::Gbnf(text) => {
                self.num_bytes += text.len();
                self.add_text(text);
            }
            GrammarSource::Choice(texts) => {
                self.num_bytes += texts.iter().map(String::len).sum::<usize>();
            }
            GrammarSource::Composed(composed) => {
                self.num_bytes += composed.start.len();
                composed.parts.iter().for_each(|part| self.add(part));
            }
        }
    }

    /// Any string of a schema may be a regular expression.
    fn add_patterns(&mut self, schema: &Value) {
        match schema {
            Value::String(text) => self.add_text(text),
            Value::Array(items) => items.iter().for_each(|item| self.add_patterns(item)),
            Value::Object(fields) => fields.iter().for_each(|(key, value)| {
                self.add_text(key);
                self.add_patterns(value);
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn add_text(&mut self, text: &str) {
        self.nesting = self.nesting.max(nesting(text));
        let mut rest = text;
        while let Some(at) = rest.find(['\\', '[']) {
            let length = class_length(&rest[at..]);
            let class = &rest[at..at + length];
            if is_wide(class) {
                self.wide_classes.insert(class.to_owned());
            }
            rest = &rest[at + length..];
        }
    }
}

/// The length of a class in brackets, or of an escape, at the beginning of `text`.
fn class_length(text: &str) -> usize {
    let (mut depth, mut is_escaped) = (0usize, false);
    for (at, c) in text.char_indices() {
        let end = at + c.len_utf8();
        match c {
            _ if is_escaped => {
                is_escaped = false;
                if depth == 0 {
                    let behind = &text[end..];
                    let is_named = matches!(c, 'p' | 'P') && behind.starts_with('{');
                    return match behind.find('}').filter(|_| is_named) {
                        Some(close) => end + close + 1,
                        None => end,
                    };
                }
            }
            '\\' => is_escaped = true,
            '[' => depth += 1,
            ']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return end;
                }
            }
            _ => {}
        }
    }
    text.len()
}

/// Whether a class may have many ranges of characters.
fn is_wide(class: &str) -> bool {
    let wide = ["\\p", "\\P", "\\w", "\\W"];
    let far = ["\\x", "\\u", "\\U"];
    let has = |escapes: &[&str]| escapes.iter().any(|escape| class.contains(escape));
    has(&wide) || class.starts_with('[') && (has(&far) || !class.is_ascii())
}

/// The deepest nesting of brackets.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest, mut is_escaped) = (0usize, 0, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => {}
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_escaped = byte == b'\\' && !is_escaped;
        deepest = deepest.max(depth);
    }
    deepest
}
