//! The lines of an answer. Without streaming, an answer is one line.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::response::Response;
use corella_core::{Logprobs, TokenId};
use corella_text::{CallFormat, ReplyPart, strftime};
use serde::Serialize;
use serde_json::{Value, json};

use super::error::ErrorLine;
use crate::call::generation::{ChoiceDelta, Finish, Generated};
use crate::call::metrics::ChoiceTimes;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::chat_reply::call_id;
use crate::endpoint::reply_block::ReplyBlock;
use crate::text::served_model::ServedModel;
use crate::text::token_logprob::{ChatLogprobs, TokenNames};
use crate::wire::api_error::ApiError;
use crate::wire::cut_json::object_of;
use crate::wire::json_response::json_response;
use crate::wire::usage::Usage;

/// The endpoint of the answer, which determines the place of a line's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    Chat,
    Generate,
}

#[derive(Serialize)]
struct Line<'a> {
    model: &'a str,
    created_at: String,
    #[serde(flatten)]
    content: Content,
    done: bool,
    #[serde(flatten)]
    end: Option<End>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<Value>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Chat { message: Message },
    Generate(Text),
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    thinking: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

#[derive(Serialize)]
struct Text {
    response: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    thinking: String,
}

/// The members of the last line only. Times are nanoseconds.
#[derive(Serialize)]
struct End {
    done_reason: &'static str,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u64,
    prompt_eval_duration: u64,
    eval_count: u64,
    eval_duration: u64,
}

impl End {
    /// A call without a finished choice has only asked to load the model.
    fn new(finish: Option<&Finish>, times: Option<ChoiceTimes>, usage: &Usage) -> Self {
        let nanos = |time: fn(&ChoiceTimes) -> Duration| {
            let time = times.as_ref().map_or(Duration::ZERO, time);
            u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
        };
        Self {
            done_reason: finish.map_or("load", |finish| finish.reason),
            total_duration: nanos(|times| times.total),
            load_duration: 0,
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: nanos(|times| times.prefill),
            eval_count: usage.completion_tokens,
            // Clients divide by this time.
            eval_duration: nanos(|times| times.decode).max(1),
        }
    }
}

/// What one line adds to the answer.
#[derive(Default)]
struct Addition {
    text: String,
    thinking: String,
    calls: Vec<Value>,
}

impl Addition {
    fn push(&mut self, block: ReplyBlock, index: &mut usize, format: Option<CallFormat>) {
        match block {
            ReplyBlock::Reasoning(text) => self.thinking.push_str(&text),
            ReplyBlock::Text(text) => self.text.push_str(&text),
            ReplyBlock::Call { name, arguments } => {
                let arguments = object_of(&arguments);
                let function = json!({"index": *index, "name": name, "arguments": arguments});
                self.calls
                    .push(json!({"id": call_id(format), "function": function}));
                *index += 1;
            }
        }
    }

    fn content(self, door: Door) -> Content {
        match door {
            Door::Chat => Content::Chat {
                message: Message {
                    role: "assistant",
                    content: self.text,
                    thinking: self.thinking,
                    tool_calls: self.calls,
                },
            },
            Door::Generate => Content::Generate(Text {
                response: self.text,
                thinking: self.thinking,
            }),
        }
    }
}

fn line(model: &str, content: Content, end: Option<End>, logprobs: Vec<Value>) -> Line<'_> {
    Line {
        model,
        created_at: timestamp(SystemTime::now()),
        content,
        done: end.is_some(),
        end,
        logprobs,
    }
}

/// Writes a time in Ollama's form.
pub fn timestamp(time: SystemTime) -> String {
    strftime("%Y-%m-%dT%H:%M:%S.%fZ", time)
}

fn logprob_rows(served: &ServedModel, tokens: &[(TokenId, Box<Logprobs>)]) -> Vec<Value> {
    let names = TokenNames {
        tokenizer: &served.tokenizer,
        as_ids: false,
    };
    ChatLogprobs::new(names, tokens).into_rows()
}

/// The answer to a request that only asks to unload its model.
pub fn unload_line(model: &str, door: Door) -> Response {
    let end = End {
        done_reason: "unload",
        ..End::new(None, None, &Usage::default())
    };
    let content = Addition::default().content(door);
    json_response(&line(model, content, Some(end), Vec::new()))
}

pub fn whole_answer(
    served: &ServedModel,
    model: &str,
    door: Door,
    mut answer: Generated,
) -> Response {
    let choice = answer.choices.pop();
    let usage = &answer.usage;
    let mut addition = Addition::default();
    let mut logprobs = Vec::new();
    let mut end = End::new(None, None, usage);
    if let Some(choice) = choice {
        addition.text = choice.text;
        let mut num_calls = 0;
        for block in ReplyBlock::all(&choice.parts) {
            addition.push(block, &mut num_calls, served.reply_format.calls);
        }
        logprobs = logprob_rows(served, &choice.logprobs);
        end = End::new(choice.finish.as_ref(), choice.times, usage);
    }
    json_response(&line(model, addition.content(door), Some(end), logprobs))
}

/// Encodes each part of a reply as a line of its own, a tool call once it is complete, and at the end a line with
/// `done`.
pub struct AnswerLines {
    served: Arc<ServedModel>,
    model: String,
    door: Door,
    /// A call with incomplete arguments.
    call: Option<ReplyBlock>,
    num_calls: usize,
    /// Log-probabilities of tokens that no line has contained yet.
    logprobs: Vec<Value>,
    finish: Option<Finish>,
    times: Option<ChoiceTimes>,
}

impl AnswerLines {
    pub fn new(served: Arc<ServedModel>, model: String, door: Door) -> Self {
        Self {
            served,
            model,
            door,
            call: None,
            num_calls: 0,
            logprobs: Vec::new(),
            finish: None,
            times: None,
        }
    }

    fn push(&mut self, block: ReplyBlock, events: &mut Events) {
        let mut addition = Addition::default();
        let format = self.served.reply_format.calls;
        addition.push(block, &mut self.num_calls, format);
        let logprobs = std::mem::take(&mut self.logprobs);
        let content = addition.content(self.door);
        events.push_line(&line(&self.model, content, None, logprobs));
    }

    fn push_part(&mut self, part: &ReplyPart, events: &mut Events) {
        if let Some(ReplyBlock::Call { arguments, .. }) = &mut self.call
            && let ReplyPart::CallArguments { json, .. } = part
        {
            arguments.push_str(json);
            return;
        }
        if let Some(call) = self.call.take() {
            self.push(call, events);
        }
        match part {
            ReplyPart::Text(text) => self.push(ReplyBlock::Text(text.clone()), events),
            ReplyPart::Reasoning(text) => self.push(ReplyBlock::Reasoning(text.clone()), events),
            ReplyPart::CallStart { .. } | ReplyPart::CallArguments { .. } => {
                self.call = Some(ReplyBlock::begun_by(part));
            }
        }
    }
}

impl ChunkEncoder for AnswerLines {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        let rows = logprob_rows(&self.served, &delta.logprobs);
        self.logprobs.extend(rows);
        if !delta.text.is_empty() {
            self.push(ReplyBlock::Text(delta.text), events);
        }
        for part in &delta.parts {
            self.push_part(part, events);
        }
        if delta.finish.is_some() {
            if let Some(call) = self.call.take() {
                self.push(call, events);
            }
            (self.finish, self.times) = (delta.finish, delta.times);
        }
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        let end = End::new(self.finish.as_ref(), self.times, usage);
        let logprobs = std::mem::take(&mut self.logprobs);
        let content = Addition::default().content(self.door);
        events.push_line(&line(&self.model, content, Some(end), logprobs));
    }

    /// Writes nothing: lines of JSON have no comments.
    fn encode_keep_alive(&mut self, _: &mut Events) {}

    fn encode_error(&mut self, error: &ApiError, events: &mut Events) {
        events.push_line(&ErrorLine::new(error));
    }
}
