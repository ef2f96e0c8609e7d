//! The named events of a streamed response.

use std::mem;
use std::sync::Arc;

use corella_text::ReplyPart;
use serde_json::{Value, json};

use super::kept::Keeping;
use super::object::{Echo, Output, Status, item_id, reasoning_part, text_part};
use crate::call::generation::ChoiceDelta;
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::reply_block::ReplyBlock;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;
use crate::wire::usage::Usage;

/// Encodes `response.created`, then each item of the output from `response.output_item.added` to
/// `response.output_item.done`, then the whole response. Events are numbered.
pub struct ResponseEvents {
    served: Arc<ServedModel>,
    head: ResponseHead,
    echo: Echo,
    keeping: Option<Keeping>,
    output: Output,
    /// The final status of the response, once known.
    status: Status,
    num_events: u64,
}

impl ResponseEvents {
    pub fn new(
        served: Arc<ServedModel>,
        head: ResponseHead,
        echo: Echo,
        keeping: Option<Keeping>,
    ) -> Self {
        Self {
            output: Output::new(served.reply_format.calls),
            served,
            head,
            echo,
            keeping,
            status: Status::InProgress,
            num_events: 0,
        }
    }

    /// Each event repeats its name as `type`.
    fn push(&mut self, name: &str, mut data: Value, events: &mut Events) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.num_events);
        self.num_events += 1;
        events.push_named(name, &data);
    }

    fn start(&mut self, events: &mut Events) {
        if self.num_events > 0 {
            return;
        }
        let response = self
            .echo
            .object(&self.head, Status::InProgress, Vec::new(), None);
        self.push("response.created", json!({"response": response}), events);
        self.push(
            "response.in_progress",
            json!({"response": response}),
            events,
        );
    }

    /// Returns the common fields of the last item's events.
    fn place(&self) -> Value {
        let index = self.output.num_items().saturating_sub(1);
        let id = self
            .output
            .last()
            .map(|block| item_id(&self.head, index, block));
        json!({"item_id": id, "output_index": index})
    }

    /// Returns the common fields of events about the only part of the last item's content.
    fn part_place(&self) -> Value {
        let mut place = self.place();
        place["content_index"] = json!(0);
        place
    }

    fn push_part(&mut self, part: &ReplyPart, logprobs: &mut Vec<Value>, events: &mut Events) {
        let is_continued = self
            .output
            .last()
            .is_some_and(|last| last.is_continued_by(part));
        if !is_continued {
            self.end_item(Status::Completed, events);
        }
        self.output.push(part);
        if !is_continued {
            self.begin_item(part, events);
        }
        let (name, mut data, text) = match part {
            ReplyPart::Text(text) => ("response.output_text.delta", self.part_place(), text),
            ReplyPart::Reasoning(text) => {
                ("response.reasoning_text.delta", self.part_place(), text)
            }
            ReplyPart::CallArguments { json, .. } => {
                ("response.function_call_arguments.delta", self.place(), json)
            }
            ReplyPart::CallStart { .. } => return,
        };
        data["delta"] = json!(text);
        if matches!(part, ReplyPart::Text(_)) {
            data["logprobs"] = json!(mem::take(logprobs));
        }
        self.push(name, data, events);
    }

    fn begin_item(&mut self, part: &ReplyPart, events: &mut Events) {
        let Some(mut item) = self.output.last_item(&self.head, Status::InProgress) else {
            return;
        };
        let (content, empty) = match part {
            ReplyPart::Text(_) | ReplyPart::Reasoning(_) => ("content", json!([])),
            _ => ("arguments", json!("")),
        };
        item[content] = empty;
        let index = self.output.num_items() - 1;
        let added = json!({"output_index": index, "item": item});
        self.push("response.output_item.added", added, events);
        let part = match part {
            ReplyPart::Text(_) => text_part("", &[]),
            ReplyPart::Reasoning(_) => reasoning_part(""),
            _ => return,
        };
        let mut added = self.part_place();
        added["part"] = part;
        self.push("response.content_part.added", added, events);
    }

    /// Ends the last item, if there is one.
    fn end_item(&mut self, status: Status, events: &mut Events) {
        let Some(item) = self.output.last_item(&self.head, status) else {
            return;
        };
        let (name, done, part) = match self.output.last() {
            Some(ReplyBlock::Text(text)) => {
                let mut done = self.part_place();
                done["text"] = json!(text);
                done["logprobs"] = json!(self.output.logprobs());
                (
                    "response.output_text.done",
                    done,
                    Some(self.output.text_part(text)),
                )
            }
            Some(ReplyBlock::Reasoning(text)) => {
                let mut done = self.part_place();
                done["text"] = json!(text);
                (
                    "response.reasoning_text.done",
                    done,
                    Some(reasoning_part(text)),
                )
            }
            Some(ReplyBlock::Call { name, arguments }) => {
                let mut done = self.place();
                done["name"] = json!(name);
                done["arguments"] = json!(arguments);
                ("response.function_call_arguments.done", done, None)
            }
            None => return,
        };
        self.push(name, done, events);
        if let Some(part) = part {
            let mut done = self.part_place();
            done["part"] = part;
            self.push("response.content_part.done", done, events);
        }
        let index = self.output.num_items() - 1;
        let done = json!({"output_index": index, "item": item});
        self.push("response.output_item.done", done, events);
    }
}

impl ChunkEncoder for ResponseEvents {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        self.start(events);
        // The first text of the delta carries the log-probabilities of the whole delta, so that each is sent once.
        let mut logprobs = self.output.push_logprobs(&self.served, &delta.logprobs);
        for part in &delta.parts {
            self.push_part(part, &mut logprobs, events);
        }
        if delta.finish.is_some() {
            self.status = Status::of(delta.finish.as_ref());
            self.end_item(self.status, events);
        }
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        let output = self.output.items(&self.head, self.status);
        let response = self
            .echo
            .object(&self.head, self.status, output, Some(usage));
        // A client may name the response in its next request right after the last event.
        if let Some(keeping) = self.keeping.take() {
            keeping.keep(&self.head.id, &response);
        }
        let name = match self.status {
            Status::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        self.push(name, json!({"response": response}), events);
    }

    fn encode_error(&mut self, error: &ApiError, events: &mut Events) {
        self.start(events);
        let data = json!({
            "code": error.code(), "message": error.message(), "param": error.param(),
        });
        self.push("error", data, events);
        let output = self.output.items(&self.head, Status::Incomplete);
        let mut response = self.echo.object(&self.head, Status::Failed, output, None);
        response["error"] = json!({"code": "server_error", "message": error.message()});
        self.push("response.failed", json!({"response": response}), events);
    }
}
