//! A call as a JSON object with a name and arguments, read during its arrival.

use serde_json::Value;

use super::json_extent::JsonExtent;
use super::part_list::PartList;

/// Reads `{"name": …, "arguments": {…}}`, in any order and among other members. The key `tool_name` may stand for
/// `name`, and `parameters` for `arguments`. The arguments may be JSON within a string.
#[derive(Default)]
pub(crate) struct CallObject {
    state: State,
    extent: JsonExtent,
    /// The current member's key, with its quotes.
    key: String,
    /// A value that is only understood as a whole.
    value: String,
    /// The text before the name was known.
    raw: String,
    /// Arguments before the name.
    early: String,
    is_started: bool,
    has_arguments: bool,
}

#[derive(Clone, Copy, Default)]
enum State {
    #[default]
    Object,
    Key,
    KeyRest,
    Colon,
    Value,
    /// Further bytes of a value, which are passed on immediately if `is_passed`.
    ValueRest(Member, IsPassed),
}

type IsPassed = bool;

#[derive(Clone, Copy, PartialEq)]
enum Member {
    Name,
    Arguments,
    Other,
}

/// The state of an object after reading.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Progress {
    More,
    Done,
    /// The object is no call.
    Text,
}

impl CallObject {
    /// Reads more of the object, and returns the number of bytes read, or `None` if `text` is empty. `out` gets no part
    /// of a call before `accepts` is true for its name. An object that is no call becomes text.
    pub(crate) fn read(
        &mut self,
        text: &str,
        out: &mut PartList,
        accepts: &dyn Fn(&str) -> bool,
    ) -> (Option<usize>, Progress) {
        if text.is_empty() {
            return (None, Progress::More);
        }
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            let byte = rest.as_bytes()[0];
            let mut len = 1;
            let mut goes_on = true;
            match self.state {
                _ if byte.is_ascii_whitespace() && !self.is_within_value() => {}
                State::Object if byte == b'{' => self.state = State::Key,
                State::Key if byte == b',' => {}
                State::Key if byte == b'}' => {
                    goes_on = false;
                    len = usize::from(self.is_started);
                }
                State::Key if byte == b'"' => {
                    self.key.clear();
                    self.extent = JsonExtent::default();
                    self.state = State::KeyRest;
                    len = 0;
                }
                State::KeyRest => {
                    let (num_bytes, is_complete) = self.extent.read(rest);
                    self.key.push_str(&rest[..num_bytes]);
                    if is_complete {
                        self.state = State::Colon;
                    }
                    len = num_bytes;
                }
                State::Colon if byte == b':' => self.state = State::Value,
                State::Value => {
                    let member = self.member();
                    self.extent = JsonExtent::default();
                    self.value.clear();
                    self.state =
                        State::ValueRest(member, member == Member::Arguments && byte == b'{');
                    len = 0;
                }
                State::ValueRest(member, is_passed) => {
                    let (num_bytes, is_complete) = self.extent.read(rest);
                    let piece = &rest[..num_bytes];
                    if is_passed {
                        self.pass_arguments(piece, out);
                    } else if member != Member::Other {
                        self.value.push_str(piece);
                    }
                    if is_complete {
                        self.state = State::Key;
                        goes_on = is_passed || self.end_value(member, out, accepts);
                    }
                    len = num_bytes;
                }
                State::Object | State::Key | State::Colon => {
                    goes_on = false;
                    len = 0;
                }
            }
            at += len;
            if !goes_on {
                let progress = self.end(&text[..at], out);
                return (Some(at), progress);
            }
        }
        if !self.is_started {
            self.raw.push_str(text);
        }
        (Some(text.len()), Progress::More)
    }

    /// The text read so far, if no call has begun.
    pub(crate) fn unread(&mut self) -> String {
        std::mem::take(&mut self.raw)
    }

    fn is_within_value(&self) -> bool {
        matches!(self.state, State::KeyRest | State::ValueRest(..))
    }

    fn member(&self) -> Member {
        match self.key.as_str() {
            "\"name\"" | "\"tool_name\"" if !self.is_started => Member::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => Member::Arguments,
            _ => Member::Other,
        }
    }

    fn pass_arguments(&mut self, json: &str, out: &mut PartList) {
        self.has_arguments = true;
        match self.is_started {
            true => out.arguments(json),
            false => self.early.push_str(json),
        }
    }

    /// Takes a complete value. Returns false if this is not a call.
    fn end_value(
        &mut self,
        member: Member,
        out: &mut PartList,
        accepts: &dyn Fn(&str) -> bool,
    ) -> bool {
        if member == Member::Other {
            return true;
        }
        let value = std::mem::take(&mut self.value);
        let value = serde_json::from_str(&value).unwrap_or(Value::Null);
        match (member, value) {
            (Member::Name, Value::String(name)) if !name.is_empty() && accepts(&name) => {
                out.start_call(&name);
                out.arguments(&std::mem::take(&mut self.early));
                self.is_started = true;
                self.raw.clear();
                true
            }
            (Member::Name, _) => false,
            (_, Value::Null) => true,
            (_, Value::String(json)) => {
                self.pass_arguments(&json, out);
                true
            }
            (_, value) => {
                self.pass_arguments(&value.to_string(), out);
                true
            }
        }
    }

    /// Ends the object after `text`. If a part of the call has been returned, the caller skips the rest.
    fn end(&mut self, text: &str, out: &mut PartList) -> Progress {
        if self.is_started {
            out.end_call();
            return Progress::Done;
        }
        out.text(&(self.unread() + text));
        Progress::Text
    }
}
