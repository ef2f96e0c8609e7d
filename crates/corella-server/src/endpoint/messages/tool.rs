//! Converts Anthropic's `tools` and `tool_choice` to OpenAI's.

use serde_json::{Map, Value, json};

use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::messages::{TOOL, TOOL_CHOICE};

/// Returns the tools in the form that chat templates read.
pub fn chat_tools(
    tools: Vec<Map<String, Value>>,
    check: FieldCheck,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    let mut list = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let path = format!("tools[{index}]");
        match tool.get("type").map(Value::as_str) {
            None | Some(Some("custom")) => {}
            Some(kind) => {
                let kind = kind.unwrap_or_default();
                let message =
                    format!("tools of type {kind:?} are not served; describe a tool of your own");
                return Err(ApiError::invalid(format!("{path}.type"), message));
            }
        }
        check.check(&TOOL, &path, tool)?;
        let Some(Value::Object(schema)) = tool.get("input_schema") else {
            let message = "must be a JSON schema, which is an object";
            return Err(ApiError::invalid(format!("{path}.input_schema"), message));
        };
        let mut function = Map::new();
        for name in ["name", "description"] {
            if let Some(value) = tool.get(name) {
                function.insert(name.to_owned(), value.clone());
            }
        }
        function.insert("parameters".to_owned(), json!(schema));
        list.push(Map::from_iter([
            ("type".to_owned(), json!("function")),
            ("function".to_owned(), Value::Object(function)),
        ]));
    }
    Ok(list)
}

/// Returns OpenAI's `tool_choice` and `parallel_tool_calls`.
pub fn chat_tool_choice(
    choice: &Map<String, Value>,
    check: FieldCheck,
) -> Result<(Value, bool), ApiError> {
    check.check(&TOOL_CHOICE, "tool_choice", choice)?;
    let is_single = match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => false,
        Some(&Value::Bool(is_single)) => is_single,
        Some(_) => {
            let field = "tool_choice.disable_parallel_tool_use";
            return Err(ApiError::invalid(field, "must be a boolean"));
        }
    };
    if !matches!(
        choice.get("name"),
        None | Some(Value::Null | Value::String(_))
    ) {
        return Err(ApiError::invalid("tool_choice.name", "must be a string"));
    }
    let choice = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => json!("auto"),
        Some("none") => json!("none"),
        Some("any") => json!("required"),
        Some("tool") => {
            let Some(name) = choice.get("name").and_then(Value::as_str) else {
                let message = "must be the name of a tool where the type is \"tool\"";
                return Err(ApiError::invalid("tool_choice.name", message));
            };
            json!({"type": "function", "function": {"name": name}})
        }
        _ => {
            return Err(ApiError::invalid(
                "tool_choice.type",
                "must be \"auto\", \"any\", \"tool\" or \"none\"",
            ));
        }
    };
    Ok((choice, !is_single))
}
