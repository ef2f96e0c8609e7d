//! The parts that a reader has found: joined, numbered, and without the white space around markup.

use super::call_reader::OfferedTools;
use crate::reply::reply_part::ReplyPart;

/// Collects parts between two calls of a parser.
#[derive(Default)]
pub(crate) struct PartList {
    parts: Vec<ReplyPart>,
    num_calls: usize,
    /// The number of calls after which further calls are left out.
    max_calls: usize,
    /// The tools that may be called. Without tools, no calls are read, and white space at the end of a text is kept.
    tools: OfferedTools,
    /// Whether the newest call is of a tool that was not offered. The name and the arguments of such a call are text.
    is_text: bool,
    /// White space at the end of the text, which is dropped if a call follows.
    space: String,
    /// White space at the end of the reasoning, which is dropped if the reasoning ends there.
    reasoning_space: String,
    has_reasoning: bool,
    /// Whether the next white space belongs to the markup before it.
    follows_markup: bool,
    /// Whether the newest call has arguments.
    has_arguments: bool,
}

impl PartList {
    pub(crate) fn new(tools: OfferedTools, max_calls: usize) -> Self {
        Self {
            max_calls,
            tools,
            ..Self::default()
        }
    }

    pub(crate) fn take(&mut self) -> Vec<ReplyPart> {
        std::mem::take(&mut self.parts)
    }

    pub(crate) fn reasoning(&mut self, text: &str) {
        let text = match self.has_reasoning {
            true => text,
            false => text.trim_start(),
        };
        let (text, space) = text.split_at(text.trim_end().len());
        if !text.is_empty() {
            self.has_reasoning = true;
            let text = std::mem::take(&mut self.reasoning_space) + text;
            match self.parts.last_mut() {
                Some(ReplyPart::Reasoning(last)) => last.push_str(&text),
                _ => self.parts.push(ReplyPart::Reasoning(text)),
            }
        }
        if self.has_reasoning {
            self.reasoning_space.push_str(space);
        }
    }

    /// Ends a stretch of reasoning. A line break separates it from the next stretch.
    pub(crate) fn end_reasoning(&mut self) {
        self.reasoning_space.clear();
        if self.has_reasoning {
            self.reasoning_space.push('\n');
        }
        self.follows_markup = true;
    }

    pub(crate) fn text(&mut self, text: &str) {
        let text = match self.follows_markup {
            true => text.trim_start(),
            false => text,
        };
        let settled = match self.tools.is_some() {
            true => text.trim_end().len(),
            false => text.len(),
        };
        let (text, space) = text.split_at(settled);
        if !text.is_empty() {
            self.follows_markup = false;
            let space = std::mem::take(&mut self.space);
            match self.parts.last_mut() {
                Some(ReplyPart::Text(last)) => {
                    last.push_str(&space);
                    last.push_str(text);
                }
                _ => self.parts.push(ReplyPart::Text(space + text)),
            }
        }
        self.space.push_str(space);
    }

    /// Ends a stretch of text. A line break separates it from the next stretch.
    pub(crate) fn end_text(&mut self) {
        if !self.follows_markup {
            self.space.clear();
            self.space.push('\n');
        }
    }

    /// Begins a call. Its name must not be empty.
    pub(crate) fn start_call(&mut self, name: &str) {
        debug_assert!(!name.is_empty());
        let is_offered = self.tools.as_ref().is_none_or(|tools| tools.contains(name));
        self.is_text = !is_offered;
        if self.is_text {
            self.text(name);
            self.text(" ");
            return;
        }
        self.space.clear();
        self.follows_markup = true;
        self.has_arguments = false;
        if self.num_calls < self.max_calls {
            let (call, name) = (self.num_calls, name.to_owned());
            self.parts.push(ReplyPart::CallStart { call, name });
        }
        self.num_calls += 1;
    }

    /// Adds to the arguments of the newest call.
    pub(crate) fn arguments(&mut self, json: &str) {
        if self.is_text {
            self.text(json);
            return;
        }
        let call = self.num_calls.saturating_sub(1);
        self.has_arguments |= !json.is_empty();
        if json.is_empty() || call >= self.max_calls {
            return;
        }
        match self.parts.last_mut() {
            Some(ReplyPart::CallArguments { json: last, .. }) => last.push_str(json),
            _ => self.parts.push(ReplyPart::CallArguments {
                call,
                json: json.to_owned(),
            }),
        }
    }

    /// Ends the newest call. A call without arguments has empty ones.
    pub(crate) fn end_call(&mut self) {
        if !self.has_arguments && !self.is_text {
            self.arguments("{}");
        }
    }

    /// Adds the held-back white space, because no call follows it.
    pub(crate) fn finish(&mut self) {
        let space = std::mem::take(&mut self.space);
        if !self.follows_markup && !space.is_empty() {
            self.parts.push(ReplyPart::Text(space));
        }
    }
}
