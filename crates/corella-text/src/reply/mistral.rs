//! Calls in the format of Mistral's models: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and in newer ones
//! `[TOOL_CALLS]name[ARGS]{…}`, perhaps with `[CALL_ID]id` after the name.

use super::call_list::CallList;
use super::call_object::Progress;
use super::call_reader::{CallReader, is_name, may_become_name, read_text};
use super::json_extent::JsonExtent;
use super::part_list::PartList;
use super::tag::{Beginning, Sight, begins_with, find_tag};

const CALLS: [&str; 1] = ["[TOOL_CALLS]"];
/// The possible texts after a name: the call's id, or its arguments, perhaps without a tag.
const AFTER_NAME: [&str; 3] = ["[CALL_ID]", "[ARGS]", "{"];
const CALL_ID: usize = 0;
const ARGS: usize = 1;

pub(crate) struct MistralReader {
    state: State,
}

enum State {
    Text,
    Calls(CallList),
    Name,
    Id,
    /// Before the arguments of a begun call.
    BeforeArguments,
    Arguments(JsonExtent),
    /// After a call, where another call may follow.
    Between,
}

impl MistralReader {
    pub(crate) fn new() -> Self {
        Self { state: State::Text }
    }

    fn handle_argument_tag(&mut self, start: usize, tag: usize) -> usize {
        match tag {
            CALL_ID => {
                self.state = State::Id;
                start + AFTER_NAME[tag].len()
            }
            ARGS => {
                self.state = State::BeforeArguments;
                start + AFTER_NAME[tag].len()
            }
            _ => {
                self.state = State::BeforeArguments;
                start
            }
        }
    }

    fn begin_arguments(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        let rest = text.trim_start();
        match rest.chars().next() {
            Some('{') => self.state = State::Arguments(JsonExtent::default()),
            None if !at_end => return None,
            _ => {
                out.end_call();
                self.state = State::Between;
            }
        }
        Some(text.len() - rest.len())
    }
}

impl CallReader for MistralReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, &CALLS, at_end, out);
                if tag.is_some() {
                    self.state = State::Calls(CallList::new());
                }
                read
            }
            State::Calls(calls) => {
                let had_begun = calls.has_begun();
                let (read, progress) = calls.read(text, out);
                match progress {
                    Progress::More => {}
                    Progress::Done => self.state = State::Between,
                    Progress::Text if had_begun => self.state = State::Text,
                    Progress::Text => self.state = State::Name,
                }
                read
            }
            State::Name => match find_tag(text, &AFTER_NAME) {
                Sight::Tag { start, tag } if is_name(text[..start].trim()) => {
                    out.start_call(text[..start].trim());
                    Some(self.handle_argument_tag(start, tag))
                }
                Sight::Clear(settled) if may_become_name(&text[..settled]) => None,
                _ => {
                    self.state = State::Text;
                    Some(0)
                }
            },
            State::Id => match find_tag(text, &AFTER_NAME) {
                Sight::Tag { start, tag } => Some(self.handle_argument_tag(start, tag)),
                Sight::Clear(settled) => (settled > 0).then_some(settled),
            },
            State::BeforeArguments => self.begin_arguments(text, at_end, out),
            State::Arguments(extent) => {
                let (len, is_complete) = extent.read(text);
                out.arguments(&text[..len]);
                if is_complete {
                    self.state = State::Between;
                }
                (len > 0).then_some(len)
            }
            State::Between => {
                let rest = text.trim_start();
                let len = text.len() - rest.len();
                if begins_with(rest, &CALLS) == Beginning::Undecided {
                    return (len > 0).then_some(len);
                }
                self.state = State::Text;
                Some(len)
            }
        }
    }
}
