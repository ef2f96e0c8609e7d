//! Reasoning between tags at the beginning of a reply, such as `<think>…</think>`.

use super::part_list::PartList;
use super::reasoning_count::Stage;
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThinkTags {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// The name of the reasoning behind its first tag. It may be missing.
    pub(crate) label: &'static str,
    /// A text that begins another part, and so ends the reasoning without its last tag.
    pub(crate) end: Option<&'static str>,
}

impl ThinkTags {
    pub(crate) const fn new(open: &'static str, close: &'static str) -> Self {
        Self {
            open,
            close,
            label: "",
            end: None,
        }
    }
}

pub(crate) struct ThinkReader {
    tags: ThinkTags,
    state: State,
}

enum State {
    /// Only white space was read.
    Start,
    /// Before the label.
    Opened,
    Inside,
    Behind,
}

impl ThinkReader {
    /// `within` means that the prompt has already opened the reasoning.
    pub(crate) fn new(tags: ThinkTags, within: bool) -> Self {
        let state = if within { State::Inside } else { State::Start };
        Self { tags, state }
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.state {
            State::Start => Stage::Undecided,
            State::Opened | State::Inside => Stage::Reasoning,
            State::Behind => Stage::Answer,
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
            State::Behind => {
                rest.push_str(text);
                (!text.is_empty()).then_some(text.len())
            }
        }
    }
}
