//! The response object and the items of its output.

use corella_core::{Logprobs, TokenId};
use corella_text::{CallFormat, ReplyPart};
use serde_json::{Map, Value, json};

use crate::call::generation::Finish;
use crate::call::response_head::ResponseHead;
use crate::endpoint::chat_reply::call_id;
use crate::endpoint::reply_block::ReplyBlock;
use crate::text::served_model::ServedModel;
use crate::text::token_logprob::{ChatLogprobs, TokenNames};
use crate::wire::usage::Usage;

/// The progress of a response, or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    InProgress,
    Completed,
    /// `max_output_tokens` or the context has cut off the response.
    Incomplete,
    Failed,
}

impl Status {
    pub fn of(finish: Option<&Finish>) -> Self {
        match finish {
            Some(finish) if finish.reason == "length" => Self::Incomplete,
            _ => Self::Completed,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
        }
    }
}

/// The request's fields that a response repeats.
pub struct Echo {
    pub previous_response_id: Option<String>,
    /// Whether the response is kept for later requests.
    pub is_kept: bool,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub metadata: Map<String, Value>,
    pub reasoning: Map<String, Value>,
    /// The member `format` of `text`.
    pub format: Value,
    pub temperature: f32,
    pub top_p: f32,
    pub top_logprobs: u32,
    pub tools: Vec<Map<String, Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: bool,
}

impl Echo {
    pub fn object(
        &self,
        head: &ResponseHead,
        status: Status,
        output: Vec<Value>,
        usage: Option<&Usage>,
    ) -> Value {
        let reason = (status == Status::Incomplete).then(|| json!({"reason": "max_output_tokens"}));
        let member = |name| self.reasoning.get(name).cloned().unwrap_or(Value::Null);
        let mut object = json!({
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status.name(),
            "background": false,
            "error": null,
            "incomplete_details": reason,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "model": head.model,
            "output": output,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": member("effort"), "summary": null},
            "service_tier": "default",
            "store": self.is_kept,
            "temperature": self.temperature,
            "text": {"format": self.format},
            "tool_choice": self.tool_choice.as_ref().unwrap_or(&json!("auto")),
            "tools": self.tools,
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": usage.map(usage_object),
            "user": null,
        });
        if let Some(explanation) = usage.and_then(|usage| usage.prefix_cache.as_deref()) {
            object["prefix_cache"] = json!(explanation);
        }
        object
    }
}

fn usage_object(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.prompt_tokens_details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens()},
        "total_tokens": usage.total_tokens,
    })
}

/// The output so far.
pub struct Output {
    format: Option<CallFormat>,
    blocks: Vec<ReplyBlock>,
    /// The id of each block that is a call; `None` for the others.
    call_ids: Vec<Option<String>>,
    /// Rows in OpenAI's form for the tokens of the answer, if requested.
    logprobs: Vec<Value>,
}

impl Output {
    pub fn new(format: Option<CallFormat>) -> Self {
        Self {
            format,
            blocks: Vec::new(),
            call_ids: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    pub fn push(&mut self, part: &ReplyPart) {
        ReplyBlock::push(&mut self.blocks, part);
        if self.call_ids.len() < self.blocks.len() {
            let is_call = matches!(part, ReplyPart::CallStart { .. });
            self.call_ids.push(is_call.then(|| call_id(self.format)));
        }
    }

    /// Adds log-probabilities, and returns the new rows.
    pub fn push_logprobs(
        &mut self,
        served: &ServedModel,
        tokens: &[(TokenId, Box<Logprobs>)],
    ) -> Vec<Value> {
        let names = TokenNames {
            tokenizer: &served.tokenizer,
            as_ids: false,
        };
        let rows: Vec<Value> = ChatLogprobs::new(names, tokens).into_rows();
        self.logprobs.extend_from_slice(&rows);
        rows
    }

    pub fn num_items(&self) -> usize {
        self.blocks.len()
    }

    pub fn last(&self) -> Option<&ReplyBlock> {
        self.blocks.last()
    }

    /// Returns the items of the output. `status` is the status of the last one.
    pub fn items(&self, head: &ResponseHead, status: Status) -> Vec<Value> {
        let last = self.blocks.len().saturating_sub(1);
        let status = |index| match index == last {
            true => status,
            false => Status::Completed,
        };
        self.blocks
            .iter()
            .enumerate()
            .map(|(index, block)| self.item(head, index, block, status(index)))
            .collect()
    }

    /// Returns the last item.
    pub fn last_item(&self, head: &ResponseHead, status: Status) -> Option<Value> {
        let block = self.last()?;
        Some(self.item(head, self.blocks.len() - 1, block, status))
    }

    fn item(&self, head: &ResponseHead, index: usize, block: &ReplyBlock, status: Status) -> Value {
        let (id, status) = (item_id(head, index, block), status.name());
        match block {
            ReplyBlock::Reasoning(text) => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [],
                "content": [reasoning_part(text)],
            }),
            ReplyBlock::Text(text) => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": [self.text_part(text)],
            }),
            ReplyBlock::Call { name, arguments } => json!({
                "id": id, "type": "function_call", "status": status,
                "call_id": self.call_ids[index], "name": name, "arguments": arguments,
            }),
        }
    }

    /// The content of a message.
    pub fn text_part(&self, text: &str) -> Value {
        text_part(text, &self.logprobs)
    }

    pub fn logprobs(&self) -> &[Value] {
        &self.logprobs
    }
}

pub fn text_part(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

pub fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

/// The id of an item, which is unique among all responses.
pub fn item_id(head: &ResponseHead, index: usize, block: &ReplyBlock) -> String {
    let prefix = match block {
        ReplyBlock::Reasoning(_) => "rs",
        ReplyBlock::Text(_) => "msg",
        ReplyBlock::Call { .. } => "fc",
    };
    format!("{prefix}_{}_{index}", head.id)
}
