//! Arguments in the format of Gemma 4: `{city:<|"|>Paris<|"|>,days:3,units:[<|"|>c<|"|>]}`. Keys have no quotes, and
//! the quotes of strings are a token of their own. The arguments are converted to JSON as they arrive.

use serde_json::Value;

use super::gemma4::CALL_END;
use super::json_extent::JsonExtent;
use super::json_writer::{JsonWriter, json_of_bare};
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The quotes of a string.
pub(crate) const QUOTE: &str = "<|\"|>";
/// The possible beginnings of a key or a value.
const BEGINNINGS: [&str; 9] = [QUOTE, CALL_END, "{", "[", "}", "]", "\"", "'", ","];
/// The possible ends of a value without quotes.
const BARE_ENDS: [&str; 4] = [",", "}", "]", CALL_END];
const KEY_ENDS: [&str; 5] = [":", ",", "}", "]", CALL_END];

/// Reads the arguments of one call, starting after their first brace.
pub(crate) struct Gemma4Arguments {
    json: JsonWriter,
    state: State,
}

enum State {
    /// In an object, before a key or the end.
    Key,
    BareKey(String),
    QuotedKey(String),
    /// A key in JSON's quotes, which the model writes by mistake.
    JsonKey(JsonExtent, String),
    /// After a key with quotes.
    Colon,
    /// Before a value, or the end of an array.
    Value,
    Text,
    /// A string in JSON's quotes.
    JsonText(JsonExtent),
    /// A string in single quotes, which the model writes by mistake.
    SingleQuoted,
    Bare(String),
    Done,
}

impl Gemma4Arguments {
    pub(crate) fn new() -> Self {
        let mut json = JsonWriter::default();
        json.open(true);
        Self {
            json,
            state: State::Key,
        }
    }

    /// Returns the JSON that was read since the last call of this function.
    pub(crate) fn take(&mut self) -> String {
        self.json.take()
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Reads from the beginning of `text`, and returns the number of bytes read; `None` if it needs more.
    pub(crate) fn step(&mut self, text: &str) -> Option<usize> {
        match &mut self.state {
            State::Key | State::Value => self.begin(text),
            State::BareKey(key) => {
                let (settled, end) = find_tag(text, &KEY_ENDS).parts();
                key.push_str(&text[..settled]);
                match end {
                    Some(0) => {
                        let key = key.trim();
                        self.json.key(key.strip_suffix('\'').unwrap_or(key));
                        self.state = State::Value;
                        Some(settled + 1)
                    }
                    // A key without a value is left out.
                    Some(_) => {
                        self.state = State::Key;
                        Some(settled)
                    }
                    None => (settled > 0).then_some(settled),
                }
            }
            State::QuotedKey(key) => match find_tag(text, &[QUOTE]) {
                Sight::Tag { start, .. } => {
                    key.push_str(&text[..start]);
                    self.json.key(key);
                    self.state = State::Colon;
                    Some(start + QUOTE.len())
                }
                Sight::Clear(settled) => {
                    key.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::JsonKey(extent, key) => {
                let (len, is_complete) = extent.read(text);
                key.push_str(&text[..len]);
                if is_complete {
                    let plain = serde_json::from_str::<String>(key);
                    self.json.key(plain.as_deref().unwrap_or(key));
                    self.state = State::Colon;
                }
                (len > 0).then_some(len)
            }
            State::Colon => self.colon(text),
            State::Text => {
                let (settled, end) = find_tag(text, &[QUOTE]).parts();
                self.text(&text[..settled], end.map(|_| QUOTE))
            }
            State::JsonText(extent) => {
                let (len, is_complete) = extent.read(text);
                self.json.raw(&text[..len]);
                if is_complete {
                    self.end_value();
                }
                (len > 0).then_some(len)
            }
            State::SingleQuoted => {
                let (settled, is_complete) = single_quoted_extent(text);
                self.text(&text[..settled], is_complete.then_some("'"))
            }
            State::Bare(value) => match find_tag(text, &BARE_ENDS) {
                Sight::Tag { start, .. } => {
                    value.push_str(&text[..start]);
                    self.json.value(&json_of_bare(value));
                    self.end_value();
                    Some(start)
                }
                Sight::Clear(settled) => {
                    value.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::Done => None,
        }
    }

    fn colon(&mut self, text: &str) -> Option<usize> {
        let rest = text.trim_start();
        let is_colon = rest.starts_with(':');
        if !rest.is_empty() {
            self.state = State::Value;
        }
        let len = text.len() - rest.len() + usize::from(is_colon);
        (len > 0 || !rest.is_empty()).then_some(len)
    }

    /// Takes more of a string, and the quote that ends it.
    fn text(&mut self, text: &str, quote: Option<&str>) -> Option<usize> {
        self.json.text(text);
        if quote.is_some() {
            self.json.end_text();
            self.end_value();
        }
        let len = text.len() + quote.map_or(0, str::len);
        (len > 0).then_some(len)
    }

    /// Reads the beginning of a key or a value.
    fn begin(&mut self, text: &str) -> Option<usize> {
        let is_key = matches!(self.state, State::Key);
        // After a key, a comma means a missing value.
        let skips_commas = is_key || !self.json.is_in_object();
        let rest = text.trim_start_matches(|c: char| c.is_whitespace() || skips_commas && c == ',');
        let len = text.len() - rest.len();
        let tag = match begins_with(rest, &BEGINNINGS) {
            Beginning::Tag(tag) => BEGINNINGS[tag],
            Beginning::Undecided => return (len > 0).then_some(len),
            Beginning::Other => {
                self.state = match is_key {
                    true => State::BareKey(String::new()),
                    false => State::Bare(String::new()),
                };
                return Some(len);
            }
        };
        if matches!(tag, CALL_END | "}" | "]" | ",") && !skips_commas {
            self.json.value(&Value::from("").to_string());
            self.state = State::Key;
            return Some(len);
        }
        match tag {
            CALL_END => {
                self.json.close_all();
                self.state = State::Done;
                return Some(len);
            }
            "}" | "]" => {
                self.json.close();
                self.end_value();
            }
            QUOTE if is_key => self.state = State::QuotedKey(String::new()),
            QUOTE => {
                self.json.begin_text();
                self.state = State::Text;
            }
            "'" if !is_key => {
                self.json.begin_text();
                self.state = State::SingleQuoted;
            }
            "'" => self.state = State::BareKey(String::new()),
            "\"" => {
                let extent = JsonExtent::default();
                if !is_key {
                    self.json.value("");
                }
                self.state = match is_key {
                    true => State::JsonKey(extent, String::new()),
                    false => State::JsonText(extent),
                };
                return Some(len);
            }
            // Brackets at the place of a key are skipped.
            _ if is_key => {}
            bracket => {
                self.json.open(bracket == "{");
                self.state = match bracket {
                    "{" => State::Key,
                    _ => State::Value,
                };
            }
        }
        Some(len + tag.len())
    }

    fn end_value(&mut self) {
        self.state = match self.json.depth() {
            0 => State::Done,
            _ if self.json.is_in_object() => State::Key,
            _ => State::Value,
        };
    }
}

/// Returns the bytes of a string before its last single quote, and whether there is one. Other single quotes are
/// apostrophes: no end of a value follows them.
fn single_quoted_extent(text: &str) -> (usize, bool) {
    for (at, _) in text.match_indices('\'') {
        let behind = text[at + 1..].trim_start();
        match begins_with(behind, &BARE_ENDS) {
            Beginning::Tag(_) => return (at, true),
            Beginning::Undecided => return (at, false),
            Beginning::Other => {}
        }
    }
    (text.len(), false)
}
