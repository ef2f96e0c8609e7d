//! JSON that is written piece by piece, as a text in another notation arrives.

use serde_json::{Number, Value};

#[derive(Debug, Default)]
pub(crate) struct JsonWriter {
    json: String,
    open: Vec<Container>,
}

#[derive(Debug)]
struct Container {
    is_object: bool,
    is_empty: bool,
}

impl JsonWriter {
    /// Returns the text that was written since the last call of this function.
    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.json)
    }

    /// The number of open objects and arrays.
    pub(crate) fn depth(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn is_in_object(&self) -> bool {
        self.open.last().is_some_and(|last| last.is_object)
    }

    /// Begins an object or an array.
    pub(crate) fn open(&mut self, is_object: bool) {
        self.begin_item();
        self.json.push(if is_object { '{' } else { '[' });
        self.open.push(Container {
            is_object,
            is_empty: true,
        });
    }

    /// Ends the innermost object or array.
    pub(crate) fn close(&mut self) {
        if let Some(last) = self.open.pop() {
            self.json.push(if last.is_object { '}' } else { ']' });
        }
    }

    pub(crate) fn close_all(&mut self) {
        while !self.open.is_empty() {
            self.close();
        }
    }

    /// Begins a member of an object. The member's value must follow.
    pub(crate) fn key(&mut self, key: &str) {
        self.separate();
        self.json += &Value::from(key).to_string();
        self.json += ": ";
    }

    /// Writes a value in JSON.
    pub(crate) fn value(&mut self, json: &str) {
        self.begin_item();
        self.json += json;
    }

    /// Begins a string, which `text` continues and `end_text` ends.
    pub(crate) fn begin_text(&mut self) {
        self.begin_item();
        self.json.push('"');
    }

    pub(crate) fn text(&mut self, text: &str) {
        let quoted = Value::from(text).to_string();
        self.json += &quoted[1..quoted.len() - 1];
    }

    pub(crate) fn end_text(&mut self) {
        self.json.push('"');
    }

    /// Continues a value in JSON.
    pub(crate) fn raw(&mut self, json: &str) {
        self.json += json;
    }

    fn begin_item(&mut self) {
        if !self.is_in_object() {
            self.separate();
        }
    }

    fn separate(&mut self) {
        if let Some(last) = self.open.last_mut()
            && !std::mem::replace(&mut last.is_empty, false)
        {
            self.json += ", ";
        }
    }
}

/// The JSON of a value without quotes: a constant of JSON or Python, a number, or else a string.
pub(crate) fn json_of_bare(text: &str) -> String {
    let text = text.trim();
    match text {
        "true" | "True" => return "true".to_owned(),
        "false" | "False" => return "false".to_owned(),
        "null" | "None" | "nil" => return "null".to_owned(),
        _ => {}
    }
    number_of_bare(text).unwrap_or_else(|| Value::from(text).to_string())
}

/// Returns the number with all its digits. JSON does not allow the forms `07`, `+1`, `.5` and `1.`, which models write.
fn number_of_bare(text: &str) -> Option<String> {
    let (sign, magnitude) = match text.strip_prefix('-') {
        Some(magnitude) => ("-", magnitude),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    if !magnitude.starts_with(|c: char| c == '.' || c.is_ascii_digit()) {
        return None;
    }
    let exponent_at = magnitude.find(['e', 'E']).unwrap_or(magnitude.len());
    let (mantissa, exponent) = magnitude.split_at(exponent_at);
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, "")) if !whole.is_empty() => (whole, ".0".to_owned()),
        Some((whole, fraction)) => (whole, format!(".{fraction}")),
        None => (mantissa, String::new()),
    };
    let whole = match whole.trim_start_matches('0') {
        "" => "0",
        digits => digits,
    };
    let json = format!("{sign}{whole}{fraction}{exponent}");
    let number = serde_json::from_str::<Number>(&json);
    number.is_ok().then_some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_json() {
        let mut writer = JsonWriter::default();
        writer.open(true);
        writer.key("a\"");
        writer.begin_text();
        writer.text("x\n");
        assert_eq!(writer.take(), "{\"a\\\"\": \"x\\n");
        writer.text("y");
        writer.end_text();
        writer.key("b");
        writer.open(false);
        writer.value("1");
        writer.open(true);
        writer.close();
        writer.close_all();
        assert_eq!(writer.take(), "y\", \"b\": [1, {}]}");
        assert_eq!(writer.depth(), 0);
    }

    #[test]
    fn a_bare_value_is_what_it_looks_like() {
        let cases = [
            ("12", "12"),
            ("-1.5e3", "-1.5e3"),
            ("07", "7"),
            ("+3", "3"),
            (".5", "0.5"),
            ("2.", "2.0"),
            ("+009007199254740993.10", "9007199254740993.10"),
            ("-.12345678901234567890E-7", "-0.12345678901234567890E-7"),
            ("1e400", "1e400"),
            ("+-1", "\"+-1\""),
            (".", "\".\""),
            ("1_0", "\"1_0\""),
            ("0x1", "\"0x1\""),
            ("True", "true"),
            ("None", "null"),
            ("nan", "\"nan\""),
            ("inf", "\"inf\""),
            ("", "\"\""),
            (" Paris ", "\"Paris\""),
        ];
        for (text, json) in cases {
            assert_eq!(json_of_bare(text), json, "{text}");
        }
    }
}
