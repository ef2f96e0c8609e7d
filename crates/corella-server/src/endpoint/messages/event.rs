//! The events of a streamed message.

use corella_text::{CallFormat, ReplyPart};
use serde_json::{Value, json};

use super::{ContentBlock, Message, MessageUsage, error_event, stop_of};
use crate::call::generation::ChoiceDelta;
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::reply_block::ReplyBlock;
use crate::wire::api_error::ApiError;
use crate::wire::usage::Usage;

/// Encodes `message_start`, then each block of content between `content_block_start` and
/// `content_block_stop`, then `message_delta` with the reason for the end, and `message_stop`.
pub struct MessageEvents {
    head: ResponseHead,
    format: Option<CallFormat>,
    is_started: bool,
    /// All blocks so far. The last one is open.
    blocks: Vec<ReplyBlock>,
}

impl MessageEvents {
    pub fn new(head: ResponseHead, format: Option<CallFormat>) -> Self {
        Self {
            head,
            format,
            is_started: false,
            blocks: Vec::new(),
        }
    }

    /// The number of prompt tokens is known with the first token.
    fn start(&mut self, usage: &Usage, events: &mut Events) {
        if std::mem::replace(&mut self.is_started, true) {
            return;
        }
        let message = Message {
            id: &self.head.id,
            kind: "message",
            role: "assistant",
            model: &self.head.model,
            content: &[],
            stop_reason: None,
            stop_sequence: None,
            usage: MessageUsage {
                output_tokens: 0,
                ..MessageUsage::new(usage)
            },
            prefix_cache: None,
        };
        push(events, "message_start", json!({"message": message}));
    }

    fn push_part(&mut self, part: &ReplyPart, events: &mut Events) {
        let index = self.blocks.len();
        let is_continued = self
            .blocks
            .last()
            .is_some_and(|last| last.is_continued_by(part));
        if !is_continued {
            self.stop_block(events);
            let block = ContentBlock::new(ReplyBlock::begun_by(part), self.format);
            let start = json!({"index": index, "content_block": block});
            push(events, "content_block_start", start);
        }
        ReplyBlock::push(&mut self.blocks, part);
        let delta = match part {
            ReplyPart::Reasoning(text) => json!({"type": "thinking_delta", "thinking": text}),
            ReplyPart::Text(text) => json!({"type": "text_delta", "text": text}),
            ReplyPart::CallArguments { json, .. } => {
                json!({"type": "input_json_delta", "partial_json": json})
            }
            ReplyPart::CallStart { .. } => return,
        };
        let index = self.blocks.len() - 1;
        push(
            events,
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        );
    }

    fn stop_block(&self, events: &mut Events) {
        if let Some(index) = self.blocks.len().checked_sub(1) {
            push(events, "content_block_stop", json!({"index": index}));
        }
    }
}

impl ChunkEncoder for MessageEvents {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        self.start(&delta.usage, events);
        for part in &delta.parts {
            self.push_part(part, events);
        }
        if delta.finish.is_some() {
            self.stop_block(events);
            let (stop_reason, stop_sequence) = stop_of(delta.finish, &self.blocks);
            let mut end = json!({
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                "usage": MessageUsage::new(&delta.usage),
            });
            if let Some(explanation) = &delta.usage.prefix_cache {
                end["prefix_cache"] = json!(**explanation);
            }
            push(events, "message_delta", end);
        }
    }

    fn encode_end(&mut self, _: &Usage, events: &mut Events) {
        push(events, "message_stop", json!({}));
    }

    fn encode_keep_alive(&mut self, events: &mut Events) {
        push(events, "ping", json!({}));
    }

    fn encode_error(&mut self, error: &ApiError, events: &mut Events) {
        events.push_named("error", &error_event(error));
    }
}

/// Each event repeats its name as `type`.
fn push(events: &mut Events, name: &'static str, mut data: Value) {
    data["type"] = json!(name);
    events.push_named(name, &data);
}
