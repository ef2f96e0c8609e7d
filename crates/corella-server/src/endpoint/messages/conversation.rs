//! Converts Anthropic's messages, whose content is a list of blocks, to the messages of a chat.

use serde_json::{Map, Value, json};

use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::messages::{BLOCK, MESSAGE, THINKING_BLOCK, TOOL_RESULT, TOOL_USE};

/// `system` becomes the first message. Errors name places in the request.
pub fn conversation(
    messages: Vec<Map<String, Value>>,
    system: Option<Value>,
    check: FieldCheck,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "must hold at least one message",
        ));
    }
    let mut conversation = Vec::with_capacity(messages.len() + 1);
    if let Some(system) = system.and_then(without_billing_header) {
        let text = text_of(&system, "system", check)?;
        conversation.push(message("system", text));
    }
    for (index, fields) in messages.iter().enumerate() {
        let path = format!("messages[{index}]");
        check.check(&MESSAGE, &path, fields)?;
        let content = fields.get("content").unwrap_or(&Value::Null);
        let path_of_content = format!("{path}.content");
        match fields.get("role").and_then(Value::as_str) {
            Some("user") => push_user(&mut conversation, content, &path_of_content, check)?,
            Some("assistant") => {
                conversation.push(assistant(content, &path_of_content, check)?);
            }
            Some("system") => {
                conversation.push(message(
                    "system",
                    text_of(content, &path_of_content, check)?,
                ));
            }
            _ => {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    "must be \"user\" or \"assistant\"",
                ));
            }
        }
    }
    Ok(conversation)
}

/// Removes Claude Code's billing header from the system prompt. The header comes first and differs between sessions, so
/// nothing after it would be found in the prefix cache. Returns `None` if nothing is left.
fn without_billing_header(system: Value) -> Option<Value> {
    const HEADER: &str = "x-anthropic-billing-header:";
    match system {
        Value::String(text) if text.starts_with(HEADER) => {
            let (_, rest) = text.split_once('\n')?;
            Some(Value::from(rest.trim_start_matches('\n')))
        }
        Value::Array(mut blocks) => {
            blocks.retain(|block| {
                !block["text"]
                    .as_str()
                    .is_some_and(|text| text.starts_with(HEADER))
            });
            (!blocks.is_empty()).then_some(Value::Array(blocks))
        }
        system => Some(system),
    }
}

fn message(role: &str, content: String) -> Map<String, Value> {
    Map::from_iter([
        ("role".to_owned(), json!(role)),
        ("content".to_owned(), json!(content)),
    ])
}

/// A message of the user has text and tool results. Each result becomes a message of its own.
fn push_user(
    conversation: &mut Vec<Map<String, Value>>,
    content: &Value,
    path: &str,
    check: FieldCheck,
) -> Result<(), ApiError> {
    let Value::Array(blocks) = content else {
        conversation.push(message("user", text_of(content, path, check)?));
        return Ok(());
    };
    let mut texts = Vec::new();
    let mut has_results = false;
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{index}]");
        if block["type"] != "tool_result" {
            texts.push(text_of_block(block, &path, check)?);
            continue;
        }
        flush(conversation, &mut texts);
        has_results = true;
        if let Value::Object(fields) = block {
            check.check(&TOOL_RESULT, &path, fields)?;
        }
        let text = match &block["content"] {
            Value::Null => String::new(),
            content => text_of(content, &format!("{path}.content"), check)?,
        };
        let mut result = message("tool", text);
        let id = required_text(block, "tool_use_id", &path)?;
        result.insert("tool_call_id".to_owned(), json!(id));
        conversation.push(result);
    }
    match texts.is_empty() && !has_results {
        true => conversation.push(message("user", String::new())),
        false => flush(conversation, &mut texts),
    }
    Ok(())
}

fn flush(conversation: &mut Vec<Map<String, Value>>, texts: &mut Vec<String>) {
    if !texts.is_empty() {
        conversation.push(message("user", texts.join("\n")));
        texts.clear();
    }
}

/// A message of the assistant has its thoughts, its text and its tool calls.
fn assistant(
    content: &Value,
    path: &str,
    check: FieldCheck,
) -> Result<Map<String, Value>, ApiError> {
    let Value::Array(blocks) = content else {
        return Ok(message("assistant", text_of(content, path, check)?));
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let fields = block.as_object();
        match block["type"].as_str() {
            Some("thinking") => {
                fields.map_or(Ok(()), |fields| check.check(&THINKING_BLOCK, &path, fields))?;
                thoughts.push(required_text(block, "thinking", &path)?);
            }
            Some("tool_use") => {
                fields.map_or(Ok(()), |fields| check.check(&TOOL_USE, &path, fields))?;
                if !block["input"].is_object() {
                    let message = "must be an object";
                    return Err(ApiError::invalid(format!("{path}.input"), message));
                }
                let name = required_text(block, "name", &path)?;
                if name.is_empty() {
                    let message = "must be the name of a tool";
                    return Err(ApiError::invalid(format!("{path}.name"), message));
                }
                calls.push(json!({
                    "id": required_text(block, "id", &path)?,
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": block["input"].to_string(),
                    },
                }));
            }
            _ => texts.push(text_of_block(block, &path, check)?),
        }
    }
    let mut assistant = message("assistant", texts.join("\n"));
    if !thoughts.is_empty() {
        let thoughts = thoughts.join("\n");
        assistant.insert("reasoning_content".to_owned(), json!(thoughts));
    }
    if !calls.is_empty() {
        assistant.insert("tool_calls".to_owned(), json!(calls));
    }
    Ok(assistant)
}

fn required_text<'a>(block: &'a Value, name: &str, path: &str) -> Result<&'a str, ApiError> {
    let text = block[name].as_str();
    text.ok_or_else(|| ApiError::invalid(format!("{path}.{name}"), "must be a string"))
}

/// Returns the text of a string or of a list of blocks, joined with line breaks like the parts of OpenAI's messages.
fn text_of(content: &Value, path: &str, check: FieldCheck) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks
                .iter()
                .enumerate()
                .map(|(index, block)| text_of_block(block, &format!("{path}[{index}]"), check))
                .collect::<Result<Vec<_>, _>>()?;
            Ok(texts.join("\n"))
        }
        _ => Err(ApiError::invalid(
            path,
            "must be a string or an array of text blocks",
        )),
    }
}

fn text_of_block(block: &Value, path: &str, check: FieldCheck) -> Result<String, ApiError> {
    match block["type"].as_str() {
        Some("text") => {}
        None => return Err(ApiError::invalid(format!("{path}.type"), "is required")),
        Some(kind) => {
            let message = format!("blocks of type {kind:?} are not supported here; send text");
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
    }
    if let Value::Object(fields) = block {
        check.check(&BLOCK, path, fields)?;
    }
    required_text(block, "text", path).map(str::to_owned)
}
