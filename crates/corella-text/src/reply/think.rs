//! Reasoning between tags at the beginning of a reply, such as `<think>…</think>`.

use super::part_list::PartList;
use super::reasoning_count::ReplyPhase;
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThinkTags {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// The name of the reasoning, which may follow the first tag.
    pub(crate) label: &'static str,
    /// A text that begins another part, and so ends the reasoning without its last tag.
    pub(crate) end: Option<&'static str>,
    /// The tags around the answer after the reasoning. A reply may lack them.
    pub(crate) answer: Option<[&'static str; 2]>,
}

impl ThinkTags {
    pub(crate) const fn new(open: &'static str, close: &'static str) -> Self {
        Self {
            open,
            close,
            label: "",
            end: None,
            answer: None,
        }
    }
}

pub(crate) struct ThinkReader {
    tags: ThinkTags,
    state: State,
    /// Whether the answer has begun.
    is_in_answer: bool,
}

enum State {
    /// Only white space was read.
    Start,
    /// Before the label.
    Opened,
    Inside,
    Behind,
    /// After the first tag of the answer.
    Answer,
}

impl ThinkReader {
    /// `within` means that the prompt has already opened the reasoning.
    pub(crate) fn new(tags: ThinkTags, within: bool) -> Self {
        let state = if within { State::Inside } else { State::Start };
        Self {
            tags,
            state,
            is_in_answer: false,
        }
    }

    pub(crate) fn phase(&self) -> ReplyPhase {
        match self.state {
            State::Start => ReplyPhase::Undecided,
            State::Opened | State::Inside => ReplyPhase::Reasoning,
            State::Behind | State::Answer => ReplyPhase::Answer,
        }
    }

    /// Reads from the beginning of `text`. Text outside of the reasoning is appended to `rest`. Returns the number of
    /// bytes read, and `None` if it needs more.
    pub(crate) fn step(
        &mut self,
        text: &str,
        at_end: bool,
        out: &mut PartList,
        rest: &mut String,
    ) -> Option<usize> {
        match self.state {
            State::Start => {
                let trimmed = text.trim_start();
                match begins_with(trimmed, &[self.tags.open]) {
                    Beginning::Tag(_) => {
                        self.state = State::Opened;
                        Some(text.len() - trimmed.len() + self.tags.open.len())
                    }
                    Beginning::Undecided if !at_end => None,
                    _ => {
                        self.state = State::Behind;
                        Some(0)
                    }
                }
            }
            State::Opened => {
                let len = match begins_with(text, &[self.tags.label]) {
                    Beginning::Undecided if !at_end => return None,
                    Beginning::Undecided => text.len(),
                    Beginning::Tag(_) => self.tags.label.len(),
                    Beginning::Other => 0,
                };
                self.state = State::Inside;
                Some(len)
            }
            State::Inside => {
                let end = self.tags.end.unwrap_or(self.tags.close);
                match find_tag(text, &[self.tags.close, self.tags.open, end]) {
                    Sight::Tag { start, tag } => {
                        out.reasoning(&text[..start]);
                        // Some models repeat the last tag of the prompt.
                        if tag == 1 {
                            self.state = State::Opened;
                            return Some(start + self.tags.open.len());
                        }
                        out.end_reasoning();
                        self.state = State::Behind;
                        let is_closed = tag == 0;
                        Some(start + if is_closed { self.tags.close.len() } else { 0 })
                    }
                    Sight::Clear(settled) => {
                        let settled = if at_end { text.len() } else { settled };
                        out.reasoning(&text[..settled]);
                        (settled > 0).then_some(settled)
                    }
                }
            }
            State::Behind => self.begin_answer(text, at_end, rest),
            State::Answer => {
                let close = self.tags.answer.map_or("", |[_, close]| close);
                let (settled, len) = match find_tag(text, &[close]) {
                    Sight::Tag { start, .. } => (start, start + close.len()),
                    Sight::Clear(_) if at_end => (text.len(), text.len()),
                    Sight::Clear(settled) => (settled, settled),
                };
                rest.push_str(&text[..settled]);
                if len > settled {
                    self.state = State::Behind;
                }
                (len > 0).then_some(len)
            }
        }
    }
    fn begin_answer(&mut self, text: &str, at_end: bool, rest: &mut String) -> Option<usize> {
        if let Some([open, _]) = self.tags.answer.filter(|_| !self.is_in_answer) {
            let trimmed = text.trim_start();
            let behind = match begins_with(trimmed, &[open]) {
                Beginning::Undecided if !at_end => return None,
                Beginning::Tag(_) => Some(text.len() - trimmed.len() + open.len()),
                _ => None,
            };
            self.is_in_answer = true;
            if behind.is_some() {
                self.state = State::Answer;
                return behind;
            }
        }
        rest.push_str(text);
        (!text.is_empty()).then_some(text.len())
    }
}
