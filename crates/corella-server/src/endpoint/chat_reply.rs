//! The message of an answer, whole or as deltas, with its parts in OpenAI's form.

use corella_text::{CallFormat, ReplyPart};
use serde::Serialize;

use crate::clock::random_seed;

/// The message of a choice in an answer without a stream.
#[derive(Serialize)]
pub struct ChatMessage {
    role: &'static str,
    /// `null` in a message that consists of calls.
    content: Option<String>,
    refusal: Option<&'static str>,
    /// Thoughts, under vLLM's name since 0.11 and under the older name, which other clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Serialize)]
struct ToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: CalledFunction,
}

#[derive(Serialize)]
struct CalledFunction {
    name: String,
    arguments: String,
}

impl ChatMessage {
    pub fn new(parts: Vec<ReplyPart>, format: Option<CallFormat>) -> Self {
        let mut content: Option<String> = None;
        let mut reasoning: Option<String> = None;
        let mut tool_calls: Vec<ToolCall> = Vec::new();
        // A resumed reply lacks the calls before this one.
        let mut first_call = None;
        let add_call = |tool_calls: &mut Vec<ToolCall>, name| {
            tool_calls.push(ToolCall {
                id: call_id(format),
                kind: "function",
                function: CalledFunction {
                    name,
                    arguments: String::new(),
                },
            });
        };
        for part in parts {
            match part {
                ReplyPart::Reasoning(text) => reasoning.get_or_insert_default().push_str(&text),
                ReplyPart::Text(text) => content.get_or_insert_default().push_str(&text),
                ReplyPart::CallStart { call, name } => {
                    first_call.get_or_insert(call);
                    add_call(&mut tool_calls, name);
                }
                ReplyPart::CallArguments { call, json } => {
                    if first_call.is_none() {
                        // Another server has begun this call, and the caller knows its name.
                        add_call(&mut tool_calls, String::new());
                    }
                    let at = call - *first_call.get_or_insert(call);
                    if let Some(call) = tool_calls.get_mut(at) {
                        call.function.arguments.push_str(&json);
                    }
                }
            }
        }
        if tool_calls.is_empty() {
            content.get_or_insert_default();
        }
        Self {
            role: "assistant",
            content,
            refusal: None,
            reasoning: reasoning.clone(),
            reasoning_content: reasoning,
            tool_calls,
        }
    }

    pub fn has_calls(&self) -> bool {
        !self.tool_calls.is_empty()
    }
}

/// What a chunk of a stream adds to the message of a choice.
#[derive(Default, Serialize)]
pub struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

/// The first delta of a call has the call's id, type and name. Later deltas have more of the arguments.
#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> ChatDelta<'a> {
    /// The first delta of every message.
    pub fn first() -> Self {
        Self {
            role: Some("assistant"),
            content: Some(""),
            ..Self::default()
        }
    }

    pub fn text(text: &'a str) -> Self {
        Self {
            content: Some(text),
            ..Self::default()
        }
    }

    pub fn of_part(part: &'a ReplyPart, format: Option<CallFormat>) -> Self {
        let mut delta = Self::default();
        match part {
            ReplyPart::Reasoning(text) => {
                delta.reasoning = Some(text);
                delta.reasoning_content = Some(text);
            }
            ReplyPart::Text(text) => delta.content = Some(text),
            ReplyPart::CallStart { call, name } => {
                delta.tool_calls = Some([CallDelta {
                    index: *call,
                    id: Some(call_id(format)),
                    kind: Some("function"),
                    function: FunctionDelta {
                        name: Some(name),
                        arguments: "",
                    },
                }]);
            }
            ReplyPart::CallArguments { call, json } => {
                delta.tool_calls = Some([CallDelta {
                    index: *call,
                    id: None,
                    kind: None,
                    function: FunctionDelta {
                        name: None,
                        arguments: json,
                    },
                }]);
            }
        }
        delta
    }
}

/// A new id for a call. Mistral's templates accept only ids of nine letters and digits.
pub fn call_id(format: Option<CallFormat>) -> String {
    let random = random_seed();
    match format {
        Some(CallFormat::Mistral) => format!("{:09x}", random >> 28),
        _ => format!("call_{random:016x}"),
    }
}
