//! Converts Ollama's messages to the messages of a chat.

use serde_json::{Map, Value, json};

use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::ollama::{CALL, CALLED_FUNCTION, MESSAGE};

/// Errors name places in the request.
pub fn conversation(
    messages: Vec<Map<String, Value>>,
    check: FieldCheck,
) -> Result<Vec<Map<String, Value>>, ApiError> {
    let mut calls = Calls::default();
    let messages = messages.into_iter().enumerate();
    messages
        .map(|(index, message)| calls.read_message(&format!("messages[{index}]"), message, check))
        .collect()
}

/// Ollama's calls need no ids, but some chat templates need them. A result without an id belongs to the first call of
/// its tool that has no result.
#[derive(Default)]
struct Calls {
    num_calls: usize,
    /// The id and the tool of each call without a result.
    open: Vec<(String, String)>,
}

impl Calls {
    fn read_message(
        &mut self,
        path: &str,
        mut fields: Map<String, Value>,
        check: FieldCheck,
    ) -> Result<Map<String, Value>, ApiError> {
        check.check(&MESSAGE, path, &fields)?;
        let role = match fields.get("role").and_then(Value::as_str) {
            Some(role @ ("user" | "assistant" | "system" | "tool")) => role.to_owned(),
            _ => {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    "must be \"user\", \"assistant\", \"system\" or \"tool\"",
                ));
            }
        };
        let content = text_member(&mut fields, "content", path)?;
        let thinking = text_member(&mut fields, "thinking", path)?;
        let tool = text_member(&mut fields, "tool_name", path)?;
        let call_id = text_member(&mut fields, "tool_call_id", path)?;
        let calls = match fields.remove("tool_calls") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(calls)) if calls.is_empty() || role == "assistant" => calls,
            Some(_) => {
                return Err(ApiError::invalid(
                    format!("{path}.tool_calls"),
                    "must be an array of calls, in a message of the assistant",
                ));
            }
        };
        let mut message = Map::from_iter([("role".to_owned(), json!(role))]);
        if role == "tool" {
            if let Some(id) = self.answered(call_id, tool.as_deref()) {
                message.insert("tool_call_id".to_owned(), json!(id));
            }
            if let Some(tool) = tool {
                message.insert("name".to_owned(), json!(tool));
            }
        }
        let content = match content {
            None if !calls.is_empty() => Value::Null,
            content => json!(content.unwrap_or_default()),
        };
        message.insert("content".to_owned(), content);
        if let Some(thinking) = thinking.filter(|thinking| !thinking.is_empty()) {
            message.insert("reasoning_content".to_owned(), json!(thinking));
        }
        if !calls.is_empty() {
            let calls = calls
                .into_iter()
                .enumerate()
                .map(|(index, call)| {
                    self.read_call(&format!("{path}.tool_calls[{index}]"), call, check)
                })
                .collect::<Result<Vec<_>, _>>()?;
            message.insert("tool_calls".to_owned(), json!(calls));
        }
        Ok(message)
    }

    fn read_call(&mut self, path: &str, call: Value, check: FieldCheck) -> Result<Value, ApiError> {
        let must_be = |path: String, expected: &str| Err(ApiError::invalid(path, expected));
        let Value::Object(mut call) = call else {
            return must_be(path.to_owned(), "must be an object");
        };
        check.check(&CALL, path, &call)?;
        let id = text_member(&mut call, "id", path)?;
        let Some(Value::Object(mut function)) = call.remove("function") else {
            return must_be(
                format!("{path}.function"),
                "must be an object with a name and arguments",
            );
        };
        let path = format!("{path}.function");
        check.check(&CALLED_FUNCTION, &path, &function)?;
        let Some(name) = text_member(&mut function, "name", &path)? else {
            return must_be(format!("{path}.name"), "is required");
        };
        let arguments = match function.remove("arguments") {
            None | Some(Value::Null) => json!({}),
            Some(arguments @ Value::Object(_)) => arguments,
            Some(_) => return must_be(format!("{path}.arguments"), "must be an object"),
        };
        self.num_calls += 1;
        // Mistral's templates accept only ids of nine letters and digits. The same conversation always has the same
        // ids, so that the prefix cache recognises it.
        let id = id.unwrap_or_else(|| format!("call{:05}", self.num_calls));
        self.open.push((id.clone(), name.clone()));
        Ok(json!({
            "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
        }))
    }

    /// Returns the id of the call that a tool's result belongs to.
    fn answered(&mut self, id: Option<String>, tool: Option<&str>) -> Option<String> {
        let position = match (&id, tool) {
            (Some(id), _) => self.open.iter().position(|(open, _)| open == id),
            (None, Some(tool)) => self.open.iter().position(|(_, name)| name == tool),
            (None, None) => (!self.open.is_empty()).then_some(0),
        };
        let open = position.map(|position| self.open.remove(position).0);
        id.or(open)
    }
}

/// Takes a text out of an object, if present.
fn text_member(
    fields: &mut Map<String, Value>,
    name: &str,
    path: &str,
) -> Result<Option<String>, ApiError> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ApiError::invalid(
            format!("{path}.{name}"),
            "must be a string",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_belong_to_the_first_open_call_of_their_tool() {
        let open = |calls: &[(&str, &str)]| Calls {
            num_calls: calls.len(),
            open: { calls.iter() }
                .map(|(id, tool)| ((*id).to_owned(), (*tool).to_owned()))
                .collect(),
        };
        let mut calls = open(&[("1", "f"), ("2", "g"), ("3", "f"), ("4", "g")]);
        assert_eq!(calls.answered(None, Some("g")).as_deref(), Some("2"));
        assert_eq!(calls.answered(None, None).as_deref(), Some("1"));
        assert_eq!(
            calls.answered(Some("4".into()), Some("g")).as_deref(),
            Some("4")
        );
        assert_eq!(calls.answered(None, Some("g")), None);
        assert_eq!(calls.answered(None, Some("f")).as_deref(), Some("3"));
        assert_eq!(calls.answered(None, None), None);
        assert_eq!(calls.answered(Some("9".into()), None).as_deref(), Some("9"));
    }
}
