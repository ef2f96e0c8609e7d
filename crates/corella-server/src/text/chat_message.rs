//! Turns the messages of a request into the messages that a chat template reads.

use serde_json::{Map, Value};

use crate::text::call_message::prepare_calls;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::chat::{CONTENT_PART, MESSAGE};

/// Templates expect `content` to be one string, whereas OpenAI's API also has lists of parts. Other
/// members of a message are passed to the template unchanged.
pub fn template_messages(
    messages: Vec<Map<String, Value>>,
    needs_text_arguments: bool,
    check: FieldCheck,
) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "must hold at least one message",
        ));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| template_message(index, message, needs_text_arguments, check))
        .collect()
}

/// Returns whether the message begins the answer: Mistral's and DeepSeek's APIs mark such a message with `prefix`, and
/// Kimi's with `partial`.
pub fn is_begun_answer(message: &Value) -> bool {
    let is_marked = ["prefix", "partial"]
        .iter()
        .any(|mark| message[*mark] == true);
    message["role"] == "assistant" && is_marked
}

fn template_message(
    index: usize,
    mut message: Map<String, Value>,
    needs_text_arguments: bool,
    check: FieldCheck,
) -> Result<Value, ApiError> {
    check.check(&MESSAGE, &format!("messages[{index}]"), &message)?;
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        return Err(ApiError::invalid(
            format!("messages[{index}].role"),
            "must be a string such as \"user\"",
        ));
    };
    let is_assistant = role == "assistant";
    match message.get_mut("tool_calls") {
        None | Some(Value::Null) => {
            // Templates test for calls by testing whether the member is defined.
            message.remove("tool_calls");
        }
        Some(Value::Array(calls)) if calls.is_empty() => {
            message.remove("tool_calls");
        }
        Some(Value::Array(calls)) if is_assistant => {
            prepare_calls(index, calls, needs_text_arguments, check)?;
        }
        Some(_) => {
            return Err(ApiError::invalid(
                format!("messages[{index}].tool_calls"),
                "must be an array of calls, in a message of the assistant",
            ));
        }
    }
    if let Some(reasoning) = message.get("reasoning")
        && !message.contains_key("reasoning_content")
    {
        // This is vLLM's newer name, which templates do not know.
        let reasoning = reasoning.clone();
        message.insert("reasoning_content".into(), reasoning);
    }
    let content = match message.get("content") {
        Some(Value::String(_)) => return Ok(Value::Object(message)),
        // vLLM also reads null beside calls as empty text: templates print the content or search it.
        None | Some(Value::Null) if is_assistant => Value::from(""),
        Some(Value::Array(parts)) => Value::from(text_of_parts(index, parts, check)?),
        _ => {
            return Err(ApiError::invalid(
                format!("messages[{index}].content"),
                "must be a string or an array of text parts",
            ));
        }
    };
    message.insert("content".into(), content);
    Ok(Value::Object(message))
}

/// Joins the parts with line breaks, as vLLM does.
fn text_of_parts(message: usize, parts: &[Value], check: FieldCheck) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (part_index, part) in parts.iter().enumerate() {
        let param = format!("messages[{message}].content[{part_index}]");
        match part["type"].as_str() {
            Some("text") => {}
            Some(kind) => {
                let message = format!("parts of type {kind:?} are not supported; send text");
                return Err(ApiError::invalid(format!("{param}.type"), message));
            }
            None => return Err(ApiError::invalid(format!("{param}.type"), "is required")),
        }
        if let Value::Object(fields) = part {
            check.check(&CONTENT_PART, &param, fields)?;
        }
        let Some(text) = part["text"].as_str() else {
            return Err(ApiError::invalid(
                format!("{param}.text"),
                "must be a string",
            ));
        };
        texts.push(text);
    }
    Ok(texts.join("\n"))
}
