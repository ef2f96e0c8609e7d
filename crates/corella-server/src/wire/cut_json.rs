//! Reads arguments of a call that `max_tokens` cut off, or that are broken JSON. Clients send such arguments back, and
//! an error would end the conversation for good.

use serde_json::{Map, Value};

/// Returns the object as far as it was written, or an empty one.
pub fn object_of(json: &str) -> Map<String, Value> {
    let parsed = serde_json::from_str(json).ok();
    match parsed.or_else(|| completed(json)) {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

/// Returns the value of JSON that breaks off: closes everything open and leaves out an incomplete member. Returns
/// `None` if there is another fault before the last member.
pub fn completed(json: &str) -> Option<Value> {
    let mut open = Vec::new();
    let (mut in_string, mut is_escaped) = (false, false);
    // The place before the last member or item, and the brackets that are open there.
    let mut safe = (0, Vec::new());
    for (at, byte) in json.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                open.push(if byte == b'{' { '}' } else { ']' });
                safe = (at + 1, open.clone());
            }
            b'}' | b']' => {
                open.pop();
            }
            b',' => safe = (at, open.clone()),
            _ => {}
        }
    }
    let closed = |text: &str, open: &[char]| {
        let closed: String = text.chars().chain(open.iter().rev().copied()).collect();
        serde_json::from_str(&closed).ok()
    };
    let whole = match (in_string, is_escaped) {
        (true, true) => format!("{}\"", &json[..json.len() - 1]),
        (true, false) => format!("{json}\""),
        (false, _) => json.to_owned(),
    };
    closed(&whole, &open).or_else(|| closed(&json[..safe.0], &safe.1))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_written_before_the_cut_is_there() {
        for (cut, expected) in [
            ("", None),
            ("{", Some(json!({}))),
            ("{\"a", Some(json!({}))),
            ("{\"a\"", Some(json!({}))),
            ("{\"a\":", Some(json!({}))),
            ("{\"a\": \"x", Some(json!({"a": "x"}))),
            ("{\"a\": \"x\\", Some(json!({"a": "x"}))),
            ("{\"a\": \"x\", \"b", Some(json!({"a": "x"}))),
            ("{\"a\": \"x\",", Some(json!({"a": "x"}))),
            ("{\"a\": tr", Some(json!({}))),
            ("{\"a\": 12", Some(json!({"a": 12}))),
            (
                "{\"a\": [1, {\"b\": \"}\", \"c\": -",
                Some(json!({"a": [1, {"b": "}"}]})),
            ),
            ("{\"a\": \"\\u00", Some(json!({}))),
            ("{\"a\": 1}", Some(json!({"a": 1}))),
        ] {
            assert_eq!(completed(cut), expected, "{cut}");
        }
    }

    /// Any cut leaves the object or a part of it.
    #[test]
    fn every_cut_of_an_object_is_an_object() {
        let whole =
            json!({"path": "a/\u{e9}\"b\\", "lines": [1, 2.5, null], "deep": {"x": {"y": true}}});
        let text = whole.to_string();
        let cuts = text.char_indices().map(|(at, _)| &text[..at]).skip(1);
        for cut in cuts {
            assert!(matches!(completed(cut), Some(Value::Object(_))), "{cut}");
        }
        assert_eq!(Value::Object(object_of(&text)), whole);
    }

    #[test]
    fn what_is_no_object_becomes_an_empty_one() {
        for text in ["", "5", "weather", "{'a': 1}", "}"] {
            assert!(object_of(text).is_empty(), "{text}");
        }
    }
}
