//! Calls in the format of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,…}<tool_call|>`, one after the other.

use super::call_reader::{CallReader, is_name, may_become_name, read_text, skip_to_tag};
use super::gemma4_arguments::{Gemma4Arguments, QUOTE};
use super::part_list::PartList;
use super::tag::{Beginning, find_tag};

pub(crate) const CALL: &str = "<|tool_call>";
pub(crate) const CALL_END: &str = "<tool_call|>";
/// The texts of tokens that mark calls.
pub(crate) const TAGS: [&str; 3] = [CALL, CALL_END, QUOTE];
const OUTSIDE: [&str; 2] = [CALL, CALL_END];

pub(crate) struct Gemma4Reader {
    state: State,
}

enum State {
    Text,
    /// Before the arguments: `call:` and the name so far.
    Head(String),
    Arguments(Box<Gemma4Arguments>),
    /// After the arguments.
    AfterArguments,
}

impl Gemma4Reader {
    pub(crate) fn new() -> Self {
        Self { state: State::Text }
    }

    fn handle_outer_tag(&mut self, tag: &str) {
        self.state = match tag {
            CALL => State::Head(String::new()),
            _ => State::Text,
        };
    }
}

/// Returns the name after `call:`. The model sometimes writes only the colon.
fn name_of(head: &str) -> &str {
    let head = head.trim();
    let name = head.strip_prefix("call:").or(head.strip_prefix(':'));
    name.unwrap_or(head).trim()
}

impl CallReader for Gemma4Reader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, &OUTSIDE, at_end, out);
                if let Some(tag) = tag {
                    self.handle_outer_tag(OUTSIDE[tag]);
                }
                read
            }
            State::Head(head) => {
                let (settled, tag) = find_tag(text, &["{", CALL, CALL_END]).parts();
                head.push_str(&text[..settled]);
                let name = name_of(head);
                match tag {
                    Some(0) if is_name(name) => {
                        out.start_call(name);
                        self.state = State::Arguments(Box::new(Gemma4Arguments::new()));
                        Some(settled + 1)
                    }
                    Some(2) if is_name(name) => {
                        out.start_call(name);
                        out.end_call();
                        self.state = State::Text;
                        Some(settled + CALL_END.len())
                    }
                    None if may_become_name(name) => (settled > 0).then_some(settled),
                    // What was read is no call, and becomes text.
                    _ => {
                        out.text(head);
                        self.state = State::Text;
                        Some(settled)
                    }
                }
            }
            State::Arguments(arguments) => {
                let read = arguments.step(text);
                out.arguments(&arguments.take());
                if arguments.is_done() {
                    self.state = State::AfterArguments;
                }
                read
            }
            State::AfterArguments => {
                let (read, beginning) = skip_to_tag(text, &['}'], &OUTSIDE);
                match beginning {
                    Beginning::Tag(tag) => self.handle_outer_tag(OUTSIDE[tag]),
                    Beginning::Undecided => {}
                    Beginning::Other => self.state = State::Text,
                }
                read
            }
        }
    }
}
