//! Replies in the format of gpt-oss (OpenAI's harmony format): each message has a channel. The channel `analysis` is
//! reasoning, `final` is text, and a message with a recipient is a call.

use super::call_reader::{CallReader, OfferedTools};
use super::part_list::PartList;
use super::reasoning_count::ReplyPhase;
use super::tag::{Sight, find_tag};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

pub(crate) const TAGS: [&str; 7] = [START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN];

/// The possible ends of a message. A model may forget the end of a message, and begin the next message.
const BODY_ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];

/// The prefix of recipients that are tools of the caller.
const FUNCTIONS: &str = "functions.";

pub(crate) struct HarmonyReader {
    /// The tools that the model may call, if any.
    tools: OfferedTools,
    reads_reasoning: bool,
    state: State,
}

enum State {
    /// Before the first header, or between messages.
    Between,
    /// The header so far. The prompt ends with `<|start|>assistant`, so the reply may begin within a header.
    Header(String),
    Body(Body),
}

#[derive(Clone, Copy, PartialEq)]
enum Body {
    Reasoning,
    Text,
    Call,
}

impl HarmonyReader {
    pub(crate) fn new(tools: OfferedTools, reads_reasoning: bool) -> Self {
        Self {
            tools,
            reads_reasoning,
            state: State::Between,
        }
    }

    fn body_of(&self, header: &str, out: &mut PartList) -> Body {
        let words = |text: &str| text.split_whitespace().next().map(str::to_owned);
        let recipient = header.split("to=").nth(1);
        let recipient = recipient.and_then(|rest| words(rest.split("<|").next()?));
        let channel = header.split(CHANNEL).nth(1);
        let channel = channel.and_then(|rest| words(rest.split("<|").next()?));
        if let Some(recipient) = recipient {
            let name = recipient.strip_prefix(FUNCTIONS).unwrap_or(&recipient);
            // The model also knows tools that were not offered here, such as `python`.
            if self
                .tools
                .as_ref()
                .is_some_and(|tools| tools.contains(name))
            {
                out.start_call(name);
                return Body::Call;
            }
        }
        match channel.as_deref() {
            Some("analysis") if self.reads_reasoning => Body::Reasoning,
            _ => Body::Text,
        }
    }

    fn end_body(body: Body, out: &mut PartList) {
        match body {
            Body::Reasoning => out.end_reasoning(),
            Body::Text => out.end_text(),
            Body::Call => out.end_call(),
        }
    }
}

impl CallReader for HarmonyReader {
    fn phase(&self) -> ReplyPhase {
        match &self.state {
            State::Between | State::Header(_) => ReplyPhase::Undecided,
            State::Body(Body::Reasoning) => ReplyPhase::Reasoning,
            State::Body(Body::Text | Body::Call) => ReplyPhase::Answer,
        }
    }

    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Between => {
                let rest = text.trim_start();
                // A header begins with a tag, a role or a recipient.
                let begins = ["<|", "to=", "assistant"];
                if begins.iter().any(|begin| rest.starts_with(begin)) {
                    self.state = State::Header(String::new());
                } else if !at_end && begins.iter().any(|begin| begin.starts_with(rest)) {
                    return None;
                } else if !rest.is_empty() {
                    self.state = State::Body(Body::Text);
                    return Some(0);
                }
                (!text.is_empty()).then_some(text.len() - rest.len())
            }
            State::Header(header) => match find_tag(text, &[MESSAGE, END]) {
                Sight::Tag { start, tag: 0 } => {
                    header.push_str(&text[..start]);
                    let header = std::mem::take(header);
                    self.state = State::Body(self.body_of(&header, out));
                    Some(start + MESSAGE.len())
                }
                Sight::Tag { start, .. } => {
                    self.state = State::Between;
                    Some(start + END.len())
                }
                Sight::Clear(settled) => {
                    header.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
            State::Body(body) => {
                let body = *body;
                let (settled, end) = match find_tag(text, &BODY_ENDS) {
                    Sight::Tag { start, tag } => (start, Some(tag)),
                    Sight::Clear(_) if at_end => (text.len(), None),
                    Sight::Clear(settled) => (settled, None),
                };
                match body {
                    Body::Reasoning => out.reasoning(&text[..settled]),
                    Body::Text => out.text(&text[..settled]),
                    Body::Call => out.arguments(&text[..settled]),
                }
                let Some(end) = end else {
                    return (settled > 0).then_some(settled);
                };
                Self::end_body(body, out);
                let tag = BODY_ENDS[end];
                self.state = match tag {
                    START | CHANNEL => State::Header(tag.to_owned()),
                    _ => State::Between,
                };
                Some(settled + tag.len())
            }
        }
    }
}
