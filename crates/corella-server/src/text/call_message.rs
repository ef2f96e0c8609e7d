//! The tool calls in earlier messages of a conversation, in the form that chat templates read.

use serde_json::{Map, Value};

use crate::wire::api_error::ApiError;
use crate::wire::cut_json::object_of;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::chat::{CALL, CALLED_FUNCTION};

/// Checks `tool_calls` of a message, and writes the arguments of each call in the template's form: an object, or JSON
/// within a string if `as_text`. OpenAI's API has only the string.
pub fn prepare_calls(
    message: usize,
    calls: &mut [Value],
    as_text: bool,
    check: FieldCheck,
) -> Result<(), ApiError> {
    for (index, call) in calls.iter_mut().enumerate() {
        let path = format!("messages[{message}].tool_calls[{index}]");
        let Value::Object(call) = call else {
            return Err(ApiError::invalid(path, "must be an object"));
        };
        check.check(&CALL, &path, call)?;
        if !matches!(call.get("type"), None | Some(Value::Null)) && call["type"] != "function" {
            let message = "must be \"function\"";
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        let path = format!("{path}.function");
        let Some(Value::Object(function)) = call.get_mut("function") else {
            return Err(ApiError::invalid(path, "must be an object with a name"));
        };
        check.check(&CALLED_FUNCTION, &path, function)?;
        prepare_function(&path, function, as_text)?;
    }
    Ok(())
}

fn prepare_function(
    path: &str,
    function: &mut Map<String, Value>,
    as_text: bool,
) -> Result<(), ApiError> {
    let name = function.get("name").and_then(Value::as_str);
    if name.is_none_or(str::is_empty) {
        let message = "must be the name of a tool";
        return Err(ApiError::invalid(format!("{path}.name"), message));
    }
    let path = format!("{path}.arguments");
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(json)) if json.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(_)) if as_text => return Ok(()),
        // As in vLLM, JSON other than an object stays as it is, except null.
        Some(Value::String(json)) => match serde_json::from_str(json) {
            Ok(Value::Null) => Value::Object(Map::new()),
            Ok(arguments) => arguments,
            Err(_) => Value::Object(object_of(json)),
        },
        Some(arguments @ (Value::Object(_) | Value::Array(_))) => arguments.clone(),
        Some(_) => return Err(ApiError::invalid(path, "must be JSON in a string")),
    };
    let arguments = match as_text {
        true => Value::from(arguments.to_string()),
        false => arguments,
    };
    function.insert("arguments".into(), arguments);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the arguments for the template, or `None` for a refusal.
    fn prepared(arguments: Value, as_text: bool) -> Option<Value> {
        let mut function = json!({"name": "now", "arguments": arguments});
        let function = function.as_object_mut().expect("an object");
        let prepared = prepare_function("function", function, as_text);
        prepared.ok().map(|()| function["arguments"].clone())
    }

    #[test]
    fn json_that_is_no_object_reaches_the_template_as_it_is() {
        for (arguments, expected) in [
            (json!("{\"a\": 1}"), json!({"a": 1})),
            (json!("\"hello\""), json!("hello")),
            (json!("\"{\\\"a\\\": 1}\""), json!("{\"a\": 1}")),
            (json!("[1, {}]"), json!([1, {}])),
            (json!("4.5"), json!(4.5)),
            (json!("true"), json!(true)),
            (json!("null"), json!({})),
            (json!(" "), json!({})),
            (json!(null), json!({})),
            (json!([1]), json!([1])),
        ] {
            let found = prepared(arguments.clone(), false);
            assert_eq!(found, Some(expected), "{arguments}");
        }
        assert_eq!(prepared(json!("\"hello\""), true), Some(json!("\"hello\"")));
        assert_eq!(prepared(json!([1]), true), Some(json!("[1]")));
        assert_eq!(prepared(json!(5), false), None);
        assert_eq!(prepared(json!(true), true), None);
    }
}
