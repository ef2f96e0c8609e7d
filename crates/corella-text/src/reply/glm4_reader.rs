//! Calls in the format of GLM-4: the reply is the name of a tool, and its arguments on the next line. A further call is a
//! further turn of the assistant.

use super::call_reader::{CallReader, OfferedTools, read_text};
use super::json_extent::JsonExtent;
use super::part_list::PartList;

/// The beginning of a turn. The name of a tool follows immediately, and a text on the next line.
pub(crate) const TURN: &str = "<|assistant|>";

pub(crate) struct Glm4Reader {
    tools: OfferedTools,
    state: State,
}

enum State {
    /// At the beginning of a turn.
    Turn,
    Text,
    Arguments(JsonExtent),
}

impl Glm4Reader {
    pub(crate) fn new(tools: OfferedTools) -> Self {
        Self {
            tools,
            state: State::Turn,
        }
    }

    fn is_offered(&self, name: &str) -> bool {
        let tools = self.tools.as_ref();
        tools.is_some_and(|tools| tools.contains(name))
    }

    /// Whether more text can make this the name of an offered tool.
    fn may_be_offered(&self, text: &str) -> bool {
        let mut names = self.tools.iter().flat_map(|tools| tools.iter());
        names.any(|(name, _)| name.starts_with(text) || text.trim_end() == name)
    }
}

impl CallReader for Glm4Reader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Turn => {
                // Reasoning ends with white space.
                let turn = text.trim_start();
                let Some((line, rest)) = turn.split_once('\n') else {
                    if self.may_be_offered(turn) && !at_end {
                        return None;
                    }
                    self.state = State::Text;
                    return Some(0);
                };
                let name = line.trim();
                let arguments = rest.trim_start();
                let is_call = self.is_offered(name);
                if is_call && arguments.is_empty() && !at_end {
                    return None;
                }
                if !is_call || !arguments.starts_with('{') {
                    self.state = State::Text;
                    return Some(0);
                }
                out.start_call(name);
                self.state = State::Arguments(JsonExtent::default());
                Some(text.len() - arguments.len())
            }
            State::Text => {
                let (read, tag) = read_text(text, &[TURN], at_end, out);
                if tag.is_some() {
                    out.end_text();
                    self.state = State::Turn;
                }
                read
            }
            State::Arguments(extent) => {
                let (len, is_complete) = extent.read(text);
                out.arguments(&text[..len]);
                if is_complete {
                    self.state = State::Text;
                }
                (len > 0).then_some(len)
            }
        }
    }
}
