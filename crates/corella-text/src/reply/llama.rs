//! Calls in the format of Llama 3: the whole reply is `{"name": …, "parameters": {…}}`, or several
//! of these with semicolons between them, perhaps after `<|python_tag|>`.

use super::call_object::{CallObject, Progress};
use super::call_reader::{CallReader, OfferedTools, read_text};
use super::part_list::PartList;
use super::tag::{Beginning, begins_with};

const PYTHON_TAG: [&str; 1] = ["<|python_tag|>"];

pub(crate) struct LlamaReader {
    tools: OfferedTools,
    state: State,
}

enum State {
    /// Only white space was read.
    Start,
    Text,
    /// In a call, which may have any name if a tag has `marked` it as a call.
    Call {
        object: Box<CallObject>,
        marked: bool,
    },
    /// After a call, where another call may follow.
    Between,
}

impl LlamaReader {
    pub(crate) fn new(tools: OfferedTools) -> Self {
        Self {
            tools,
            state: State::Start,
        }
    }

    fn start_call(&mut self, marked: bool) {
        self.state = State::Call {
            object: Box::default(),
            marked,
        };
    }
}

impl CallReader for LlamaReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Start => {
                let rest = text.trim_start();
                if rest.starts_with('{') {
                    self.start_call(false);
                    return Some(text.len() - rest.len());
                }
                match begins_with(rest, &PYTHON_TAG) {
                    Beginning::Undecided if !at_end => None,
                    _ => {
                        self.state = State::Text;
                        Some(0)
                    }
                }
            }
            State::Text => {
                let (read, tag) = read_text(text, &PYTHON_TAG, at_end, out);
                if tag.is_some() {
                    self.start_call(true);
                }
                read
            }
            State::Call { object, marked } => {
                let (tools, marked) = (&self.tools, *marked);
                // Without the tag, the object may be JSON that the user requested, so it must name a tool.
                let is_offered = |name: &str| tools.as_ref().is_some_and(|set| set.contains(name));
                let (read, progress) = object.read(text, out, &|name| marked || is_offered(name));
                match progress {
                    Progress::More if read.is_none() && at_end && !marked => {
                        out.text(&object.unread());
                    }
                    Progress::More => {}
                    Progress::Done => self.state = State::Between,
                    Progress::Text => self.state = State::Text,
                }
                read
            }
            State::Between => {
                let rest =
                    text.trim_start_matches(|c: char| c.is_whitespace() || c == ';' || c == ',');
                let len = text.len() - rest.len();
                if rest.starts_with('{') {
                    self.start_call(false);
                    return Some(len);
                }
                match begins_with(rest, &PYTHON_TAG) {
                    Beginning::Undecided => (len > 0).then_some(len),
                    Beginning::Tag(_) | Beginning::Other => {
                        self.state = State::Text;
                        Some(len)
                    }
                }
            }
        }
    }
}
