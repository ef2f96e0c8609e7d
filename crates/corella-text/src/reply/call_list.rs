//! Calls as JSON objects: one, or a list of them.

use super::call_object::{CallObject, Progress};
use super::part_list::PartList;

pub(crate) struct CallList {
    state: State,
}

enum State {
    /// Before the list, or before the only call.
    Start,
    /// In the list, between two calls.
    Between,
    Object {
        object: Box<CallObject>,
        in_list: bool,
    },
}

impl CallList {
    pub(crate) fn new() -> Self {
        let state = State::Start;
        Self { state }
    }

    /// Whether a list or a call has begun.
    pub(crate) fn has_begun(&self) -> bool {
        !matches!(self.state, State::Start)
    }

    /// Reads more of the list, and returns the number of bytes read; `None` if it needs more text. The list ends where
    /// no further call follows.
    pub(crate) fn read(&mut self, text: &str, out: &mut PartList) -> (Option<usize>, Progress) {
        let in_list = match &mut self.state {
            State::Start => false,
            State::Between => true,
            State::Object { object, in_list } => {
                let (read, progress) = object.read(text, out, &|_| true);
                if *in_list && progress == Progress::Done {
                    self.state = State::Between;
                    return (read, Progress::More);
                }
                return (read, progress);
            }
        };
        let rest = text.trim_start_matches(|c: char| c.is_whitespace() || in_list && c == ',');
        let len = text.len() - rest.len();
        match rest.chars().next() {
            None => return (None, Progress::More),
            Some('[') if !in_list => {
                self.state = State::Between;
                return (Some(len + 1), Progress::More);
            }
            Some(']') if in_list => return (Some(len + 1), Progress::Done),
            Some('{') => {}
            Some(_) => return (Some(len), Progress::Text),
        }
        let object = Box::default();
        self.state = State::Object { object, in_list };
        (Some(len), Progress::More)
    }
}
