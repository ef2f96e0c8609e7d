//! Reads Anthropic's messages, whose content is a list of blocks, as the messages of a chat template.

use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::field_check::FieldCheck;
use crate::field_table::messages::{BLOCK, MESSAGE};

/// `system` becomes the first message. Faults are named by their places in the request.
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
    if let Some(system) = system {
        let text = text_of(&system, "system", check)?;
        conversation.push(message("system", text));
    }
    for (index, fields) in messages.iter().enumerate() {
        let path = format!("messages[{index}]");
        check.check(&MESSAGE, &path, fields)?;
        let role = match fields.get("role").and_then(Value::as_str) {
            Some(role @ ("user" | "assistant" | "system")) => role,
            _ => {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    "must be \"user\" or \"assistant\"",
                ));
            }
        };
        let content = fields.get("content").unwrap_or(&Value::Null);
        let text = text_of(content, &format!("{path}.content"), check)?;
        conversation.push(message(role, text));
    }
    Ok(conversation)
}

fn message(role: &str, content: String) -> Map<String, Value> {
    Map::from_iter([
        ("role".to_owned(), json!(role)),
        ("content".to_owned(), json!(content)),
    ])
}

/// The text of a string or of a list of blocks, which are joined with line breaks, as parts of OpenAI's
/// messages are.
fn text_of(content: &Value, path: &str, check: FieldCheck) -> Result<String, ApiError> {
    let blocks = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(blocks) => blocks,
        _ => {
            return Err(ApiError::invalid(
                path,
                "must be a string or an array of text blocks",
            ));
        }
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let kind = block["type"].as_str();
        if kind != Some("text") {
            let message = match kind {
                None => "is required".to_owned(),
                Some(kind) => format!("blocks of type {kind:?} are not supported; send text"),
            };
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        if let Value::Object(fields) = block {
            check.check(&BLOCK, &path, fields)?;
        }
        let Some(text) = block["text"].as_str() else {
            return Err(ApiError::invalid(
                format!("{path}.text"),
                "must be a string",
            ));
        };
        texts.push(text);
    }
    Ok(texts.join("\n"))
}
