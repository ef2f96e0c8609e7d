//! Calls as a list in JSON behind a tag: Granite 3's `<|tool_call|>[{"name": …, "arguments": {…}}, …]`, and Command R's
//! list of `{"tool_name": …, "parameters": {…}}` in a block of code behind `Action:`.

use super::call_object::{CallObject, Progress};
use super::call_reader::{CallReader, read_text};
use super::part_list::PartList;
use super::tag::{Beginning, begins_with};

/// The texts around the list of a format.
#[derive(Clone, Copy)]
pub(crate) struct ListTags {
    pub begin: &'static [&'static str],
    end: &'static str,
}

/// Granite 3.1 begins the list with `<tool_call>`, which is text to its tokenizer. Some replies close it, as other
/// models do.
pub(crate) const GRANITE: ListTags = ListTags {
    begin: &["<|tool_call|>", "<tool_call>"],
    end: "</tool_call>",
};
/// Templates have the line break, and the model's card has a space.
pub(crate) const COMMAND_R: ListTags = ListTags {
    begin: &["Action:\n```json", "Action: ```json", "Action:```json"],
    end: "```",
};

pub(crate) struct ListReader {
    tags: ListTags,
    state: State,
}

enum State {
    Text,
    AfterTag,
    /// In the list, between two calls.
    List,
    Object {
        object: Box<CallObject>,
        in_list: bool,
    },
    /// Behind the list.
    AfterList,
}

impl ListReader {
    pub(crate) fn new(tags: ListTags) -> Self {
        let state = State::Text;
        Self { tags, state }
    }
}

fn object(in_list: bool) -> State {
    State::Object {
        object: Box::new(CallObject::new()),
        in_list,
    }
}

impl CallReader for ListReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, self.tags.begin, at_end, out);
                if tag.is_some() {
                    self.state = State::AfterTag;
                }
                read
            }
            State::AfterTag => {
                let rest = text.trim_start();
                let len = text.len() - rest.len();
                let (state, num_read) = match rest.chars().next()? {
                    '[' => (State::List, 1),
                    '{' => (object(false), 0),
                    // This is no call, and becomes text.
                    _ => (State::Text, 0),
                };
                self.state = state;
                Some(len + num_read)
            }
            State::List => {
                let rest = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                let len = text.len() - rest.len();
                let (state, num_read) = match rest.chars().next()? {
                    '{' => (object(true), 0),
                    ']' => (State::AfterList, 1),
                    _ => (State::Text, 0),
                };
                self.state = state;
                Some(len + num_read)
            }
            State::Object { object, in_list } => {
                let (read, progress) = object.read(text, out, &|_| true);
                match progress {
                    Progress::More => {}
                    Progress::Done if *in_list => self.state = State::List,
                    Progress::Done => self.state = State::AfterList,
                    Progress::Text => self.state = State::Text,
                }
                read
            }
            State::AfterList => {
                let rest = text.trim_start();
                let len = text.len() - rest.len();
                match begins_with(rest, &[self.tags.end]) {
                    Beginning::Undecided => (len > 0).then_some(len),
                    beginning => {
                        self.state = State::Text;
                        let is_end = beginning == Beginning::Tag(0);
                        Some(len + if is_end { self.tags.end.len() } else { 0 })
                    }
                }
            }
        }
    }
}
