//! JSON schemas within a grammar in Lark's notation, after `%json`.

use serde_json::{Deserializer, Value};

use crate::GrammarError;

/// Returns the grammar with its schemas replaced by `compiled` ones. The parser of grammars reports texts that are no
/// grammar.
///
/// # Errors
/// Those of `compiled`.
pub(crate) fn with_compiled_schemas(
    lark: &str,
    compiled: impl Fn(&Value) -> Result<Value, GrammarError>,
) -> Result<String, GrammarError> {
    const KEYWORD: &str = "%json";
    let mut written = String::with_capacity(lark.len());
    let mut rest = lark;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '%' if rest.starts_with(KEYWORD) => {
                let behind = &rest[KEYWORD.len()..];
                let mut values = Deserializer::from_str(behind).into_iter::<Value>();
                let Some(Ok(schema)) = values.next() else {
                    break;
                };
                let end = values.byte_offset();
                let schema = compiled(&schema).map_err(|error| {
                    GrammarError::at_root(format!("the schema behind `%json` is wrong: {error}"))
                })?;
                written.push_str(&format!("{KEYWORD} {schema}"));
                rest = &behind[end..];
                continue;
            }
            '#' => line_length(rest),
            '/' if rest.starts_with("//") => line_length(rest),
            '"' | '/' => quoted_length(rest, first),
            '<' => special_length(rest),
            _ => first.len_utf8(),
        };
        written.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    written.push_str(rest);
    Ok(written)
}

fn line_length(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// The length up to and with the next `quote` that is not escaped.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// The length of a special token such as `</think>`, or else of its first character.
fn special_length(text: &str) -> usize {
    let end = text[1..].find(|c: char| matches!(c, '<' | '>') || c.is_whitespace());
    match end {
        Some(end) if end > 0 && text[1 + end..].starts_with('>') => end + 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_are_found_behind_their_keyword_alone() {
        let lark = r##"start: "%json {}" /%json [a"]/ </t%json> a // %json {}
a: %json {"type": "null"} "x" # %json {}
b: %json [1 %json {}"##;
        let compiled = with_compiled_schemas(lark, |schema| Ok(json!([schema])));
        let expected = lark.replace(r#"{"type": "null"}"#, r#"[{"type":"null"}]"#);
        assert_eq!(compiled, Ok(expected));
    }
}
