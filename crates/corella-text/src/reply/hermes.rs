//! Calls in the format of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

use super::call_object::{CallObject, Progress};
use super::call_reader::{CallReader, read_text, skip_to_tag};
use super::part_list::PartList;
use super::tag::Beginning;

const TAGS: [&str; 2] = ["<tool_call>", "</tool_call>"];
const OPEN: usize = 0;

pub(crate) struct HermesReader {
    state: State,
}

enum State {
    Text,
    Call(Box<CallObject>),
    /// After the object of a call.
    AfterObject,
}

impl HermesReader {
    pub(crate) fn new() -> Self {
        Self { state: State::Text }
    }

    fn handle_tag(&mut self, tag: usize) {
        self.state = match tag {
            OPEN => State::Call(Box::default()),
            _ => State::Text,
        };
    }
}

impl CallReader for HermesReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, &TAGS, at_end, out);
                if let Some(tag) = tag {
                    self.handle_tag(tag);
                }
                read
            }
            State::Call(object) => {
                let (read, progress) = object.read(text, out, &|_| true);
                match progress {
                    Progress::More => {}
                    Progress::Done => self.state = State::AfterObject,
                    Progress::Text => self.state = State::Text,
                }
                read
            }
            State::AfterObject => {
                // Models sometimes write one closing bracket too many.
                let (read, beginning) = skip_to_tag(text, &['}'], &TAGS);
                match beginning {
                    Beginning::Tag(tag) => self.handle_tag(tag),
                    Beginning::Undecided => {}
                    Beginning::Other => self.state = State::Text,
                }
                read
            }
        }
    }
}
