//! What every format of calls has to do.

use std::sync::Arc;

use super::part_list::PartList;
use super::reasoning_count::Stage;
use super::tag::{Sight, find_tag};
use super::tool_set::ToolSet;

/// Finds calls in a growing text.
pub(crate) trait CallReader: Send {
    /// Reads from the beginning of `text`, which is what no earlier step has read, and returns how many
    /// bytes it has read. `None` asks for more text: the reader cannot say yet what `text` is.
    /// `at_end` says that there is no more; what remains after `None` is then dropped.
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize>;

    /// Where in the reply it is. Most formats mark reasoning apart from calls.
    fn stage(&self) -> Stage {
        Stage::Answer
    }
}

/// Reads replies without calls: everything is text.
pub(crate) struct PlainReader;

impl CallReader for PlainReader {
    fn step(&mut self, text: &str, _: bool, out: &mut PartList) -> Option<usize> {
        out.text(text);
        (!text.is_empty()).then_some(text.len())
    }
}

/// Tells the text before the first of `tags`, or as much as is part of no tag. Returns how many bytes were
/// read, the tag's included, and the place of the tag in the list.
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

/// The tools that were offered, if any were.
pub(crate) type OfferedTools = Option<Arc<ToolSet>>;

/// The most bytes of a name. A longer one is text that looks like markup.
const MAX_NAME_BYTES: usize = 256;

/// Whether a model may have meant this as the name of a tool.
pub(crate) fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.chars().all(is_part)
}

/// Whether more text can still make a name of this.
pub(crate) fn may_become_name(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || is_name(text)
}
