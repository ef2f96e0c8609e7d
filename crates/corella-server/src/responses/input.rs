//! Reads `input`, a text or a list of items, as the messages of a chat template.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::field_check::FieldCheck;
use crate::field_table::responses::{CONTENT, MESSAGE};

/// The value of the field.
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

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<InputField, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = items.next_element()? {
                    all.push(item);
                }
                Ok(InputField::Items(all))
            }
        }

        deserializer.deserialize_any(InputVisitor)
    }
}

/// `instructions` become the first message. Faults are named by their places in the request.
pub fn conversation(
    input: InputField,
    instructions: Option<&str>,
    check: FieldCheck,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    let mut conversation = Vec::new();
    conversation.extend(instructions.map(|text| message("system", text.to_owned())));
    let items = match input {
        InputField::Text(text) => {
            conversation.push(message("user", text));
            return Ok(conversation);
        }
        InputField::Items(items) => items,
    };
    if items.is_empty() {
        return Err(ApiError::invalid("input", "must hold at least one item"));
    }
    for (index, item) in items.iter().enumerate() {
        let path = format!("input[{index}]");
        match item.get("type").map(Value::as_str) {
            None | Some(Some("message")) => conversation.push(read_message(item, &path, check)?),
            Some(Some(kind)) => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    format!("items of type {kind:?} are not supported; send messages"),
                ));
            }
            Some(None) => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    "must be a string",
                ));
            }
        }
    }
    Ok(conversation)
}

fn read_message(
    item: &Map<String, Value>,
    path: &str,
    check: FieldCheck,
) -> Result<Map<String, Value>, ApiError> {
    check.check(&MESSAGE, path, item)?;
    let role = match item.get("role").and_then(Value::as_str) {
        Some(role @ ("user" | "assistant" | "system")) => role,
        // OpenAI's newer name. Chat templates know the older one.
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
        Some(Value::Array(parts)) => text_of(parts, &format!("{path}.content"), check)?,
        _ => {
            return Err(ApiError::invalid(
                format!("{path}.content"),
                "must be a string or an array of text parts",
            ));
        }
    };
    Ok(message(role, text))
}

/// Joins the parts with line breaks, as those of a chat's messages.
fn text_of(parts: &[Value], path: &str, check: FieldCheck) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{path}[{index}]");
        match part["type"].as_str() {
            Some("input_text" | "output_text" | "text") => {}
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
