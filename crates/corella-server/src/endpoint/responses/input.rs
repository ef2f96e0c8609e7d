//! Converts `input`, a text or a list of items, to the messages of a chat template.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::store::response_store::Turn;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::responses::{CALL, CALL_OUTPUT, CONTENT, MESSAGE, THOUGHT};

/// The value of the field `input`.
pub enum InputField {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

impl<'de> Deserialize<'de> for InputField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InputVisitor;

        impl<'de> Visitor<'de> for InputVisitor {
            type Value = InputField;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of input items")
            }

            fn visit_str<E>(self, text: &str) -> Result<InputField, E> {
                Ok(InputField::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<InputField, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(InputField::Items)
            }
        }

        deserializer.deserialize_any(InputVisitor)
    }
}

impl InputField {
    /// A text becomes a user's message.
    pub fn into_items(self) -> Vec<Map<String, Value>> {
        match self {
            Self::Text(text) => vec![message("user", text)],
            Self::Items(items) => items,
        }
    }
}

/// Returns the messages: `instructions`, the turns `before` the input, and the input. Errors name places in the
/// request.
pub fn conversation(
    before: &[Arc<Turn>],
    input: &InputField,
    instructions: Option<&str>,
    check: FieldCheck,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    let mut conversation = Vec::new();
    conversation.extend(instructions.map(|text| message("system", text.to_owned())));
    for turn in before {
        push_items(
            &mut conversation,
            "previous_response_id",
            &turn.items(),
            check,
        )?;
    }
    match input {
        InputField::Text(text) => conversation.push(message("user", text.clone())),
        InputField::Items(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "must hold at least one item"));
        }
        InputField::Items(items) => push_items(&mut conversation, "input", items, check)?,
    }
    Ok(conversation)
}

/// `field` names the source of the items in errors.
fn push_items(
    conversation: &mut Vec<Map<String, Value>>,
    field: &str,
    items: &[Map<String, Value>],
    check: FieldCheck,
) -> Result<(), ApiError> {
    for (index, item) in items.iter().enumerate() {
        let path = format!("{field}[{index}]");
        let kind = match item.get("type") {
            None => "message",
            Some(Value::String(kind)) => kind,
            Some(_) => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    "must be a string",
                ));
            }
        };
        // A kept response lists its items by these ids.
        if !matches!(item.get("id"), None | Some(Value::Null | Value::String(_))) {
            let field = format!("{path}.id");
            return Err(ApiError::invalid(field, "must be a string"));
        }
        match kind {
            "message" => {
                let message = read_message(item, &path, check)?;
                push_message(conversation, message);
            }
            "reasoning" => {
                check.check(&THOUGHT, &path, item)?;
                let content = item.get("content").unwrap_or(&Value::Null);
                if let Value::Array(parts) = content {
                    let text = text_of(
                        parts,
                        &format!("{path}.content"),
                        &["reasoning_text"],
                        check,
                    )?;
                    let turn = open_turn(conversation);
                    turn.insert("reasoning_content".to_owned(), json!(text));
                }
            }
            "function_call" => push_call(conversation, item, &path, check)?,
            "function_call_output" => conversation.push(read_output(item, &path, check)?),
            kind => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    format!("items of type {kind:?} are not supported"),
                ));
            }
        }
    }
    Ok(())
}

/// Returns the last message if it is the assistant's, or adds one: thoughts, text and calls of one turn are several
/// items, but one message of a chat.
fn open_turn(conversation: &mut Vec<Map<String, Value>>) -> &mut Map<String, Value> {
    let is_open = conversation
        .last()
        .is_some_and(|last| last["role"] == "assistant");
    if !is_open {
        conversation.push(message("assistant", String::new()));
    }
    let last = conversation.len() - 1;
    &mut conversation[last]
}

/// The assistant's text joins the thoughts before it.
fn push_message(conversation: &mut Vec<Map<String, Value>>, message: Map<String, Value>) {
    let is_thought = |last: &Map<String, Value>| {
        last["role"] == "assistant" && last["content"] == "" && !last.contains_key("tool_calls")
    };
    match conversation.last_mut() {
        Some(last) if message["role"] == "assistant" && is_thought(last) => {
            last.insert("content".to_owned(), message["content"].clone());
        }
        _ => conversation.push(message),
    }
}

fn push_call(
    conversation: &mut Vec<Map<String, Value>>,
    item: &Map<String, Value>,
    path: &str,
    check: FieldCheck,
) -> Result<(), ApiError> {
    check.check(&CALL, path, item)?;
    let name = required_text(item, "name", path)?;
    if name.is_empty() {
        let message = "must be the name of a tool";
        return Err(ApiError::invalid(format!("{path}.name"), message));
    }
    let call = json!({
        "id": required_text(item, "call_id", path)?,
        "type": "function",
        "function": {
            "name": name,
            "arguments": required_text(item, "arguments", path)?,
        },
    });
    let turn = open_turn(conversation);
    let calls = turn.entry("tool_calls").or_insert_with(|| json!([]));
    if let Value::Array(calls) = calls {
        calls.push(call);
    }
    Ok(())
}

fn read_output(
    item: &Map<String, Value>,
    path: &str,
    check: FieldCheck,
) -> Result<Map<String, Value>, ApiError> {
    check.check(&CALL_OUTPUT, path, item)?;
    let text = match item.get("output") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => text_of(parts, &format!("{path}.output"), &TEXT_PARTS, check)?,
        _ => {
            return Err(ApiError::invalid(
                format!("{path}.output"),
                "must be a string or an array of text parts",
            ));
        }
    };
    let mut result = message("tool", text);
    let id = required_text(item, "call_id", path)?;
    result.insert("tool_call_id".to_owned(), json!(id));
    Ok(result)
}

fn required_text<'a>(
    item: &'a Map<String, Value>,
    name: &str,
    path: &str,
) -> Result<&'a str, ApiError> {
    let text = item.get(name).and_then(Value::as_str);
    text.ok_or_else(|| ApiError::invalid(format!("{path}.{name}"), "must be a string"))
}

fn read_message(
    item: &Map<String, Value>,
    path: &str,
    check: FieldCheck,
) -> Result<Map<String, Value>, ApiError> {
    check.check(&MESSAGE, path, item)?;
    let role = match item.get("role").and_then(Value::as_str) {
        Some(role @ ("user" | "assistant" | "system")) => role,
        // This is OpenAI's newer name of "system", which chat templates know.
        Some("developer") => "system",
        _ => {
            return Err(ApiError::invalid(
                format!("{path}.role"),
                "must be \"user\", \"assistant\", \"system\" or \"developer\"",
            ));
        }
    };
    let text = match item.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            text_of(parts, &format!("{path}.content"), &TEXT_PARTS, check)?
        }
        _ => {
            return Err(ApiError::invalid(
                format!("{path}.content"),
                "must be a string or an array of text parts",
            ));
        }
    };
    Ok(message(role, text))
}

const TEXT_PARTS: [&str; 3] = ["input_text", "output_text", "text"];

/// Joins the texts of parts with line breaks, as in a chat's messages. A part of another kind than `kinds` is an error.
fn text_of(
    parts: &[Value],
    path: &str,
    kinds: &[&str],
    check: FieldCheck,
) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{path}[{index}]");
        match part["type"].as_str() {
            Some(kind) if kinds.contains(&kind) => {}
            Some(kind) => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    format!("parts of type {kind:?} are not supported; send text"),
                ));
            }
            None => return Err(ApiError::invalid(format!("{path}.type"), "is required")),
        }
        if let Value::Object(fields) = part {
            check.check(&CONTENT, &path, fields)?;
        }
        let Some(text) = part["text"].as_str() else {
            return Err(ApiError::invalid(
                format!("{path}.text"),
                "must be a string",
            ));
        };
        texts.push(text);
    }
    Ok(texts.join("\n"))
}

fn message(role: &str, content: String) -> Map<String, Value> {
    Map::from_iter([
        ("role".to_owned(), json!(role)),
        ("content".to_owned(), json!(content)),
    ])
}
