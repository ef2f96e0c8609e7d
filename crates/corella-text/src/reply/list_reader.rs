//! Calls as a list in JSON after a tag: Granite 3's `<|tool_call|>[{"name": …, "arguments": {…}}, …]`, and Command R's
//! list of `{"tool_name": …, "parameters": {…}}` in a block of code after `Action:`.

use super::call_list::CallList;
use super::call_object::Progress;
use super::call_reader::{CallReader, read_text, skip_to_tag};
use super::part_list::PartList;
use super::tag::Beginning;

/// The texts around the list of a format.
#[derive(Clone, Copy)]
pub(crate) struct ListTags {
    pub begin: &'static [&'static str],
    end: &'static str,
}

/// Granite 3.1 begins the list with `<tool_call>`, which is text to its tokenizer. Some replies end the list with a
/// closing tag, as other models do.
pub(crate) const GRANITE: ListTags = ListTags {
    begin: &["<|tool_call|>", "<tool_call>"],
    end: "</tool_call>",
};
/// In chat templates the tag has a line break, and in the model card a space.
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
    Calls(CallList),
    AfterList,
}

impl ListReader {
    pub(crate) fn new(tags: ListTags) -> Self {
        let state = State::Text;
        Self { tags, state }
    }
}

impl CallReader for ListReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, self.tags.begin, at_end, out);
                if tag.is_some() {
                    self.state = State::Calls(CallList::new());
                }
                read
            }
            State::Calls(calls) => {
                let (read, progress) = calls.read(text, out);
                match progress {
                    Progress::More => {}
                    Progress::Done => self.state = State::AfterList,
                    Progress::Text => self.state = State::Text,
                }
                read
            }
            State::AfterList => {
                let (read, beginning) = skip_to_tag(text, &[], &[self.tags.end]);
                if beginning != Beginning::Undecided {
                    self.state = State::Text;
                }
                read
            }
        }
    }
}
