//! Calls in Python: LFM2's list `<|tool_call_start|>[name(key='text', …), …]<|tool_call_end|>`, and Olmo 3's lines
//! between `<function_calls>` and `</function_calls>`. LFM2 writes objects in JSON instead if its prompt asks for JSON.

use super::call_object::{CallObject, Progress};
use super::call_reader::{
    CallReader, OfferedTools, is_name, may_become_name, read_text, skip_to_tag,
};
use super::part_list::PartList;
use super::python_arguments::PythonArguments;
use super::tag::{Beginning, begins_with, find_tag};

/// The texts around the calls of a format.
#[derive(Clone, Copy)]
pub(crate) struct PythonBlock {
    /// The tags that begin and end the block.
    pub tags: &'static [&'static str; 2],
    /// Whether each call is on a line of its own, and not in a list.
    pub has_lines: bool,
}

pub(crate) const LFM2: PythonBlock = PythonBlock {
    tags: &["<|tool_call_start|>", "<|tool_call_end|>"],
    has_lines: false,
};
pub(crate) const OLMO3: PythonBlock = PythonBlock {
    tags: &["<function_calls>", "</function_calls>"],
    has_lines: true,
};

impl PythonBlock {
    pub(crate) fn end(&self) -> &'static str {
        self.tags[1]
    }
}

pub(crate) struct PythonReader {
    block: PythonBlock,
    tools: OfferedTools,
    state: State,
}

enum State {
    Text,
    /// In a list of calls, before one or after it. The brackets around it may be missing.
    List,
    Name(String),
    Arguments(Box<PythonArguments>),
    Object(Box<CallObject>),
    /// After the list.
    AfterList,
    /// After the tag that ends the list.
    AfterBlock,
}

impl PythonReader {
    pub(crate) fn new(block: PythonBlock, tools: OfferedTools) -> Self {
        Self {
            block,
            tools,
            state: State::Text,
        }
    }

    fn handle_tag(&mut self, tag: usize) {
        self.state = match tag {
            0 => State::List,
            _ => State::AfterBlock,
        };
    }

    /// Whether this may be the beginning of a list whose first call names an offered tool.
    fn may_be_list(&self, text: &str) -> bool {
        let Some(calls) = text.strip_prefix('[') else {
            return false;
        };
        match (calls.split_once('('), &self.tools) {
            (Some((name, _)), Some(tools)) => tools.contains(name.trim()),
            (Some(_), None) => false,
            (None, _) => may_become_name(calls),
        }
    }

    /// Skips a repetition: the model sometimes repeats the list after the end tag, without the tag that begins it.
    fn skip_repetition(&mut self, text: &str, at_end: bool) -> Option<usize> {
        let (rest, end) = (text.trim_start(), self.block.end());
        let len = text.len() - rest.len();
        let is_list = !rest.is_empty() && self.may_be_list(rest);
        match rest.find(end).filter(|_| is_list) {
            Some(at) => return Some(len + at + end.len()),
            None if rest.is_empty() || is_list && !at_end => {
                return (len > 0).then_some(len);
            }
            None => {}
        }
        self.state = State::Text;
        Some(len)
    }
}

impl CallReader for PythonReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        let (tags, end) = (self.block.tags, self.block.end());
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, tags, at_end, out);
                if let Some(tag) = tag {
                    self.handle_tag(tag);
                }
                read
            }
            State::List => {
                let rest =
                    text.trim_start_matches(|c: char| c.is_whitespace() || c == ',' || c == '[');
                let len = text.len() - rest.len();
                let (state, num_read) = match begins_with(rest, &["{", "]", end]) {
                    Beginning::Tag(0) => (State::Object(Box::default()), 0),
                    Beginning::Tag(1) => (State::AfterList, 1),
                    Beginning::Tag(_) => (State::AfterList, 0),
                    Beginning::Undecided => return (len > 0).then_some(len),
                    Beginning::Other => (State::Name(String::new()), 0),
                };
                self.state = state;
                Some(len + num_read)
            }
            State::Name(name) => {
                let (settled, tag) = find_tag(text, &["(", end, tags[0], "]"]).parts();
                name.push_str(&text[..settled]);
                match tag {
                    Some(0) if is_name(name.trim()) => {
                        out.start_call(name.trim());
                        self.state = State::Arguments(Box::new(PythonArguments::new(self.block)));
                        Some(settled + 1)
                    }
                    None if may_become_name(name) => (settled > 0).then_some(settled),
                    // What was read is no call, and becomes text.
                    _ => {
                        out.text(name);
                        self.state = State::Text;
                        Some(settled)
                    }
                }
            }
            State::Arguments(arguments) => {
                let read = arguments.step(text, at_end);
                out.arguments(&arguments.take());
                if arguments.is_done() {
                    self.state = State::List;
                }
                read
            }
            State::Object(object) => {
                let (read, progress) = object.read(text, out, &|_| true);
                match progress {
                    Progress::More => {}
                    Progress::Done => self.state = State::List,
                    Progress::Text => self.state = State::Text,
                }
                read
            }
            State::AfterList => {
                let (read, beginning) = skip_to_tag(text, &[']'], tags);
                match beginning {
                    Beginning::Tag(tag) => self.handle_tag(tag),
                    Beginning::Undecided => {}
                    Beginning::Other => self.state = State::Text,
                }
                read
            }
            State::AfterBlock => self.skip_repetition(text, at_end),
        }
    }
}
