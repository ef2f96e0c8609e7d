//! Calls in the format of DeepSeek V3 and R1, with a type, a name and a fenced block of JSON, and of V3.1, with a name
//! and JSON.

use super::call_reader::{CallReader, is_name, read_text};
use super::json_extent::JsonExtent;
use super::part_list::PartList;
use super::tag::{Sight, find_tag};

const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const OUTSIDE: [&str; 4] = [CALL_BEGIN, CALLS_BEGIN, CALL_END, CALLS_END];

pub(crate) const TAGS: [&str; 5] = [CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END];

pub(crate) struct DeepSeekReader {
    /// Whether a type comes before the name, and the arguments are in a fenced block.
    has_type: bool,
    state: State,
}

enum State {
    Text,
    /// Between two calls.
    Calls,
    /// Before the separator, with the type or the name so far.
    Head(String),
    /// After the separator, with the name so far.
    Name(String),
    BeforeArguments,
    Arguments(JsonExtent),
    AfterArguments,
}

impl DeepSeekReader {
    pub(crate) fn new(has_type: bool) -> Self {
        Self {
            has_type,
            state: State::Text,
        }
    }

    fn handle_outer_tag(&mut self, tag: &str) {
        self.state = match tag {
            CALL_BEGIN => State::Head(String::new()),
            CALLS_END => State::Text,
            _ => State::Calls,
        };
    }

    fn start_call(&mut self, name: &str, out: &mut PartList) {
        self.state = match is_name(name) {
            true => {
                out.start_call(name);
                State::BeforeArguments
            }
            false => State::Calls,
        };
    }
}

impl CallReader for DeepSeekReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, &OUTSIDE, at_end, out);
                if let Some(tag) = tag {
                    self.handle_outer_tag(OUTSIDE[tag]);
                }
                read
            }
            State::Calls | State::AfterArguments => match find_tag(text, &OUTSIDE) {
                Sight::Tag { start, tag } => {
                    self.handle_outer_tag(OUTSIDE[tag]);
                    Some(start + OUTSIDE[tag].len())
                }
                Sight::Clear(settled) => (settled > 0).then_some(settled),
            },
            State::Head(head) => match find_tag(text, &[SEPARATOR, CALL_END]) {
                Sight::Tag { start, tag: 0 } => {
                    head.push_str(&text[..start]);
                    let head = std::mem::take(head);
                    match self.has_type {
                        true => self.state = State::Name(String::new()),
                        false => self.start_call(head.trim(), out),
                    }
                    Some(start + SEPARATOR.len())
                }
                Sight::Tag { start, .. } => {
                    self.state = State::Calls;
                    Some(start + CALL_END.len())
                }
                Sight::Clear(settled) => {
                    head.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::Name(name) => match find_tag(text, &["\n", "```", CALL_END]) {
                Sight::Tag { start, .. } => {
                    name.push_str(&text[..start]);
                    let name = std::mem::take(name);
                    self.start_call(name.trim(), out);
                    Some(start)
                }
                Sight::Clear(settled) => {
                    name.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::BeforeArguments => match find_tag(text, &["{", CALL_END, CALL_BEGIN, CALLS_END])
            {
                Sight::Tag { start, tag: 0 } => {
                    self.state = State::Arguments(JsonExtent::default());
                    Some(start)
                }
                Sight::Tag { start, .. } => {
                    out.end_call();
                    self.state = State::AfterArguments;
                    Some(start)
                }
                Sight::Clear(settled) => (settled > 0).then_some(settled),
            },
            State::Arguments(extent) => {
                let (len, is_complete) = extent.read(text);
                out.arguments(&text[..len]);
                if is_complete {
                    self.state = State::AfterArguments;
                }
                (len > 0).then_some(len)
            }
        }
    }
}
