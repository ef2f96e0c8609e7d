//! Describes a field of the wrong type in JSON's terms: serde names Rust's types.

use crate::wire::short_text::shown;

/// Rewrites "invalid type: integer `-1`, expected u32" as "must be a whole number from 0 up, not -1". Other messages
/// stay unchanged.
pub fn in_json_words(message: &str) -> String {
    let rewritten = || {
        let rest = message
            .strip_prefix("invalid type: ")
            .or_else(|| message.strip_prefix("invalid value: "))?;
        let (found, expected) = rest.rsplit_once(", expected ")?;
        Some(format!(
            "must be {}, not {}",
            expected_words(expected),
            found_words(found)
        ))
    };
    rewritten().unwrap_or_else(|| message.to_owned())
}

fn expected_words(expected: &str) -> &str {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0 up",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        other => other,
    }
}

/// Returns the value alone if serde gives a kind and a value.
fn found_words(found: &str) -> &str {
    const KINDS: [&str; 4] = ["integer ", "floating point ", "boolean ", "string "];
    match found {
        "map" => "an object",
        "sequence" => "an array",
        "unit value" => "null",
        "number" => "a number",
        _ => {
            let value = KINDS.iter().find_map(|kind| found.strip_prefix(kind));
            shown(value.map_or(found, |value| value.trim_matches('`')))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Fields {
        #[serde(rename = "a")]
        _a: Option<u32>,
        #[serde(rename = "b")]
        _b: Option<bool>,
        #[serde(rename = "c")]
        _c: Option<Vec<i64>>,
        #[serde(rename = "d")]
        _d: Option<f64>,
        #[serde(rename = "e")]
        _e: Option<String>,
    }

    #[test]
    fn a_wrong_type_is_told_in_words_of_json() {
        for (json, told) in [
            (r#"{"a": -1}"#, "must be a whole number from 0 up, not -1"),
            (r#"{"a": 0.5}"#, "must be a whole number from 0 up, not 0.5"),
            (
                r#"{"a": "x"}"#,
                r#"must be a whole number from 0 up, not "x""#,
            ),
            (r#"{"b": 1}"#, "must be true or false, not 1"),
            (r#"{"c": {}}"#, "must be an array, not an object"),
            (r#"{"c": [null]}"#, "must be a whole number, not null"),
            (r#"{"d": []}"#, "must be a number, not an array"),
            (r#"{"e": true}"#, "must be a string, not true"),
            (r#"{"e": 0.5}"#, "must be a string, not a number"),
            (r#"{"e": 1, "#, "must be a string, not 1"),
        ] {
            let error = serde_json::from_str::<Fields>(json)
                .unwrap_err()
                .to_string();
            let message = error.split(" at line ").next().unwrap();
            assert_eq!(in_json_words(message), told, "{json}");
        }
        assert_eq!(in_json_words("missing field `a`"), "missing field `a`");
    }

    #[test]
    fn a_long_value_is_cut() {
        let message = format!(
            "invalid type: string \"{}\", expected u32",
            "x".repeat(1000)
        );
        let words = in_json_words(&message);
        assert!(
            words.starts_with("must be a whole number from 0 up, not \"xxx"),
            "{words}"
        );
        assert!(words.len() < 400, "{words}");
    }
}
