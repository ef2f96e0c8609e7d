//! The interface of all formats of calls.

use std::sync::Arc;

use super::part_list::PartList;
use super::reasoning_count::ReplyPhase;
use super::tag::{Beginning, Sight, begins_with, find_tag};
use super::tool_set::ToolSet;

/// Finds calls in a growing text.
pub(crate) trait CallReader: Send {
    /// Reads from the beginning of `text`, which no earlier step has read, and returns the number of bytes read. `None`
    /// asks for more text: the reader cannot classify `text` yet. `at_end` means that no more text follows. If the
    /// reader then returns `None`, the rest is dropped.
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize>;

    /// The phase of the reply that the reader is in. Most formats mark reasoning separately from calls.
    fn phase(&self) -> ReplyPhase {
        ReplyPhase::Answer
    }
}

/// Reads replies without calls, which are all text.
pub(crate) struct PlainReader;

impl CallReader for PlainReader {
    fn step(&mut self, text: &str, _: bool, out: &mut PartList) -> Option<usize> {
        out.text(text);
        (!text.is_empty()).then_some(text.len())
    }
}

/// Adds the text before the first of `tags` to `out`. Without a tag, adds the text that cannot be the beginning of one.
/// Returns the number of bytes read, including the tag, and the index of the tag in the list.
pub(crate) fn read_text(
    text: &str,
    tags: &[&str],
    at_end: bool,
    out: &mut PartList,
) -> (Option<usize>, Option<usize>) {
    match find_tag(text, tags) {
        Sight::Tag { start, tag } => {
            out.text(&text[..start]);
            (Some(start + tags[tag].len()), Some(tag))
        }
        Sight::Clear(settled) => {
            let settled = if at_end { text.len() } else { settled };
            out.text(&text[..settled]);
            ((settled > 0).then_some(settled), None)
        }
    }
}

/// Skips white space and `skipped` before one of `tags`. Returns the number of bytes read, including the tag, and the
/// beginning of the other text.
pub(crate) fn skip_to_tag(
    text: &str,
    skipped: &[char],
    tags: &[&str],
) -> (Option<usize>, Beginning) {
    let rest = text.trim_start_matches(|c: char| c.is_whitespace() || skipped.contains(&c));
    let len = text.len() - rest.len();
    let beginning = begins_with(rest, tags);
    let read = match beginning {
        Beginning::Tag(tag) => Some(len + tags[tag].len()),
        Beginning::Undecided => (len > 0).then_some(len),
        Beginning::Other => Some(len),
    };
    (read, beginning)
}

/// The offered tools, if any.
pub(crate) type OfferedTools = Option<Arc<ToolSet>>;

/// The most bytes of a name. A longer one is text that resembles markup.
const MAX_NAME_BYTES: usize = 256;

/// Whether this can be the name of a tool.
pub(crate) fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.chars().all(is_part)
}

/// Whether more text can still make this a name.
pub(crate) fn may_become_name(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || is_name(text)
}
