//! The fields that offer tools to the model: `tools`, `tool_choice` and `parallel_tool_calls`.

use std::collections::BTreeSet;
use std::sync::Arc;

use corella_text::{ChatTemplate, ToolSet, WantedCalls};
use serde_json::{Map, Value};

use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_limit::MAX_TOOL_NAME_BYTES;
use crate::wire::field_table::chat::{FUNCTION, TOOL};

/// The fields as sent.
pub struct ToolFields {
    pub tools: Vec<Map<String, Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: bool,
}

/// Tools offered to the model.
#[derive(Debug)]
pub struct OfferedTools {
    /// The list as the caller wrote it, for the chat template.
    pub list: Value,
    pub set: Arc<ToolSet>,
    /// Whether only the first call counts.
    pub one_call: bool,
    /// The calls that the model must make, if any.
    pub demanded_calls: Option<WantedCalls>,
    /// The names of all tools, in the request's order.
    pub names: Vec<String>,
}

/// The caller's choice among the tools.
#[derive(Debug, PartialEq)]
enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
    /// Only these tools may be called, and one must be called if `is_required`.
    Allowed {
        names: BTreeSet<String>,
        is_required: bool,
    },
}

impl ToolFields {
    /// Checks the fields. Returns `None` if the model should answer without tools.
    pub fn offered(
        self,
        served: &ServedModel,
        check: FieldCheck,
    ) -> Result<Option<OfferedTools>, ApiError> {
        let mut tools = self.tools;
        let mut schemas = Vec::with_capacity(tools.len());
        let mut names = Vec::with_capacity(tools.len());
        for (index, tool) in tools.iter().enumerate() {
            let (name, schema) = check_tool(index, tool, check)?;
            if names.contains(&name) {
                return Err(ApiError::invalid(
                    format!("tools[{index}].function.name"),
                    "is the name of an earlier tool",
                ));
            }
            names.push(name.clone());
            schemas.push((name, schema));
        }
        let demanded_calls = match tool_choice(self.tool_choice.as_ref(), &names)? {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto if names.is_empty() => return Ok(None),
            ToolChoice::Auto => None,
            ToolChoice::Required => Some(WantedCalls::Any),
            ToolChoice::Named(name) => Some(WantedCalls::One(name)),
            ToolChoice::Allowed {
                names: allowed,
                is_required,
            } => {
                // The model does not see the other tools, so it does not try to call them.
                let mut is_allowed = names.iter().map(|name| allowed.contains(name));
                tools.retain(|_| is_allowed.next() == Some(true));
                schemas.retain(|(name, _)| allowed.contains(name));
                is_required.then_some(WantedCalls::Any)
            }
        };
        let template = served.chat_template.as_ref();
        if !template.is_some_and(ChatTemplate::reads_tools) {
            return Err(ApiError::invalid(
                "tools",
                "the chat template of this model does not read tools",
            ));
        }
        if served.reply_format.calls.is_none() {
            return Err(ApiError::invalid(
                "tools",
                "how this model writes calls is not known; start the server with --tool-call-parser",
            ));
        }
        Ok(Some(OfferedTools {
            list: tools.into_iter().map(Value::Object).collect(),
            set: Arc::new(ToolSet::new(schemas)),
            one_call: !self.parallel_tool_calls,
            demanded_calls,
            names,
        }))
    }
}

/// Returns the name of a tool, and the schema of its parameters.
fn check_tool(
    index: usize,
    tool: &Map<String, Value>,
    check: FieldCheck,
) -> Result<(String, Value), ApiError> {
    let path = format!("tools[{index}]");
    check.check(&TOOL, &path, tool)?;
    match tool.get("type").and_then(Value::as_str) {
        Some("function") => {}
        Some(kind) => {
            let message = format!("tools of type {kind:?} are not supported; \"function\" is");
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        None => {
            let message = "must be \"function\"";
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
    }
    let Some(Value::Object(function)) = tool.get("function") else {
        let message = "must be an object with a name";
        return Err(ApiError::invalid(format!("{path}.function"), message));
    };
    let path = format!("{path}.function");
    check.check(&FUNCTION, &path, function)?;
    let name = function.get("name").and_then(Value::as_str).unwrap_or("");
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > MAX_TOOL_NAME_BYTES || !name.chars().all(is_part) {
        let message =
            format!("must be 1 to {MAX_TOOL_NAME_BYTES} letters, digits, '_', '-' or '.'");
        return Err(ApiError::invalid(format!("{path}.name"), message));
    }
    if !matches!(
        function.get("description"),
        None | Some(Value::Null | Value::String(_))
    ) {
        let message = "must be a string";
        return Err(ApiError::invalid(format!("{path}.description"), message));
    }
    let schema = match function.get("parameters") {
        None | Some(Value::Null) => Value::Null,
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => {
            let message = "must be a JSON schema, which is an object";
            return Err(ApiError::invalid(format!("{path}.parameters"), message));
        }
    };
    Ok((name.to_owned(), schema))
}

fn tool_choice(choice: Option<&Value>, names: &[String]) -> Result<ToolChoice, ApiError> {
    const EXPECTED: &str = "must be \"none\", \"auto\", \"required\", \
        {\"type\": \"function\", \"function\": {\"name\": NAME}} or \
        {\"type\": \"allowed_tools\", \"allowed_tools\": {\"mode\": MODE, \"tools\": TOOLS}}";
    let choice = match choice {
        None | Some(Value::Null) => return Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => return Ok(ToolChoice::None),
            "auto" => return Ok(ToolChoice::Auto),
            "required" => ToolChoice::Required,
            _ => return Err(ApiError::invalid("tool_choice", EXPECTED)),
        },
        Some(choice) => match choice["type"].as_str() {
            Some("function") => match choice["function"]["name"].as_str() {
                Some(name) => ToolChoice::Named(name.to_owned()),
                None => return Err(ApiError::invalid("tool_choice", EXPECTED)),
            },
            Some("allowed_tools") => allowed_tools(&choice["allowed_tools"], names)?,
            _ => return Err(ApiError::invalid("tool_choice", EXPECTED)),
        },
    };
    match &choice {
        _ if names.is_empty() => Err(ApiError::invalid("tool_choice", "needs tools")),
        ToolChoice::Named(name) if !names.contains(name) => Err(ApiError::invalid(
            "tool_choice.function.name",
            "is not the name of one of the tools",
        )),
        _ => Ok(choice),
    }
}

/// Reads a choice of some of the tools.
fn allowed_tools(choice: &Value, names: &[String]) -> Result<ToolChoice, ApiError> {
    const FIELD: &str = "tool_choice.allowed_tools";
    let is_required = match choice["mode"].as_str() {
        Some("auto") => false,
        Some("required") => true,
        _ => {
            let message = "must be \"auto\" or \"required\"";
            return Err(ApiError::invalid(format!("{FIELD}.mode"), message));
        }
    };
    let tools = choice["tools"].as_array().filter(|tools| !tools.is_empty());
    let Some(tools) = tools else {
        let message = "must be a list of tools";
        return Err(ApiError::invalid(format!("{FIELD}.tools"), message));
    };
    let mut allowed = BTreeSet::new();
    for (index, tool) in tools.iter().enumerate() {
        let name = tool["function"]["name"].as_str();
        match name.filter(|name| names.iter().any(|known| known == name)) {
            Some(name) => allowed.insert(name.to_owned()),
            None => {
                return Err(ApiError::invalid(
                    format!("{FIELD}.tools[{index}].function.name"),
                    "is not the name of one of the tools",
                ));
            }
        };
    }
    Ok(ToolChoice::Allowed {
        names: allowed,
        is_required,
    })
}
