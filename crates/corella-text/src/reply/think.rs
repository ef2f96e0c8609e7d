//! Reasoning between tags at the beginning of a reply, such as `<think>…</think>`.

use super::part_list::PartList;
use super::reasoning_count::Stage;
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThinkTags {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

pub(crate) struct ThinkReader {
    tags: ThinkTags,
    state: State,
}

enum State {
    /// Nothing but white space was read.
    Start,
    Inside,
    Behind,
}

impl ThinkReader {
    /// `within` says that the prompt has opened the reasoning already.
    pub(crate) fn new(tags: ThinkTags, within: bool) -> Self {
        let state = if within { State::Inside } else { State::Start };
        Self { tags, state }
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.state {
            State::Start => Stage::Undecided,
            State::Inside => Stage::Reasoning,
            State::Behind => Stage::Answer,
        }
    }

    /// Reads from the beginning of `text`. What is not reasoning is appended to `rest`. Returns how many
    /// bytes it has read, and `None` if it needs more.
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
                        self.state = State::Inside;
                        Some(text.len() - trimmed.len() + self.tags.open.len())
                    }
                    Beginning::Undecided if !at_end => None,
                    _ => {
                        self.state = State::Behind;
                        Some(0)
                    }
                }
            }
            State::Inside => match find_tag(text, &[self.tags.close, self.tags.open]) {
                Sight::Tag { start, tag } => {
                    out.reasoning(&text[..start]);
                    if tag == 0 {
                        out.end_reasoning();
                        self.state = State::Behind;
                        return Some(start + self.tags.close.len());
                    }
                    // Some models repeat the tag that the prompt ends with.
                    Some(start + self.tags.open.len())
                }
                Sight::Clear(settled) => {
                    let settled = if at_end { text.len() } else { settled };
                    out.reasoning(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::Behind => {
                rest.push_str(text);
                (!text.is_empty()).then_some(text.len())
            }
        }
    }
}
