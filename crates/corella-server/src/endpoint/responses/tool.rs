//! Converts `tools` and `tool_choice` of the Responses API to a chat's. In the Responses API, no object `function` is
//! around a function's fields.

use corella_engine::rare_line;
use serde_json::{Map, Value, json};

use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::responses::TOOL;

/// Kinds of tools that OpenAI's servers run, or that no chat template can describe. Codex offers them to every model.
const SKIPPED: [&str; 16] = [
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
];

/// Members of tools that chat templates do not describe.
const NOT_SHOWN: [&str; 6] = [
    "type",
    "strict",
    "defer_loading",
    "allowed_callers",
    "async",
    "output_schema",
];

/// The tools that the model is shown.
#[derive(Default)]
pub struct KeptTools {
    /// The tools in the form that chat templates read.
    pub list: Vec<Map<String, Value>>,
    /// The index of each tool in the request.
    pub places: Vec<usize>,
}

/// Leaves out tools that no model can call here, as llama.cpp does. The prompt does not mention them.
pub fn chat_tools(tools: &[Map<String, Value>], check: FieldCheck) -> Result<KeptTools, ApiError> {
    let mut kept = KeptTools::default();
    for (index, tool) in tools.iter().enumerate() {
        let path = format!("tools[{index}]");
        let kind = tool.get("type").and_then(Value::as_str);
        match kind {
            Some("function") => {}
            Some(kind) if SKIPPED.contains(&kind) => {
                rare_line!(
                    info,
                    "the model is not told of a response's tool of type {kind}, which no model can call here"
                );
                continue;
            }
            _ => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    "must be \"function\": the caller calls tools, not the server",
                ));
            }
        }
        check.check(&TOOL, &path, tool)?;
        let mut function = tool.clone();
        for name in NOT_SHOWN {
            function.remove(name);
        }
        kept.places.push(index);
        kept.list.push(Map::from_iter([
            ("type".to_owned(), json!("function")),
            ("function".to_owned(), Value::Object(function)),
        ]));
    }
    Ok(kept)
}

/// Returns the choice in a chat's form.
pub fn chat_tool_choice(choice: &Value) -> Result<Value, ApiError> {
    let function = |tool: &Value| json!({"type": "function", "function": {"name": tool["name"]}});
    match choice["type"].as_str() {
        Some("function") if choice["name"].is_string() => Ok(function(choice)),
        Some("function") => {
            let message = "must be the name of a tool";
            Err(ApiError::invalid("tool_choice.name", message))
        }
        Some("allowed_tools") => {
            let tools = choice["tools"].as_array();
            let tools: Option<Vec<_>> = tools.map(|tools| tools.iter().map(function).collect());
            let allowed = json!({"mode": choice["mode"], "tools": tools});
            Ok(json!({"type": "allowed_tools", "allowed_tools": allowed}))
        }
        _ if matches!(choice.as_str(), Some("none" | "auto" | "required")) => Ok(choice.clone()),
        _ => Err(ApiError::invalid(
            "tool_choice",
            "must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"name\": NAME} or \
             {\"type\": \"allowed_tools\", \"mode\": MODE, \"tools\": TOOLS}",
        )),
    }
}

/// Renames the fields in a chat's error to this API's names. `places` are the kept tools' indexes in the request.
pub fn in_own_names(error: ApiError, places: &[usize]) -> ApiError {
    error
        .renamed("tool_choice.allowed_tools", "tool_choice")
        .without_function()
        .of_kept_tools(places)
        .renamed("messages", "input")
}
