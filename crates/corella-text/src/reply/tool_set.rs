//! The offered tools of a model: their names, and the types of their parameters.

use std::collections::BTreeMap;

use serde_json::Value;

/// Tools by name, each with the JSON schema of its parameters.
#[derive(Clone, Debug, Default)]
pub struct ToolSet {
    parameters: BTreeMap<String, Value>,
}

/// The largest depth of references and alternatives that are followed in a parameter's schema.
const MAX_SCHEMA_DEPTH: usize = 8;

impl ToolSet {
    /// Makes a set from names and schemas. `Value::Null` stands for a missing schema.
    pub fn new(tools: impl IntoIterator<Item = (String, Value)>) -> Self {
        Self {
            parameters: tools.into_iter().collect(),
        }
    }

    pub fn contains(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// The tools in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.parameters
            .iter()
            .map(|(name, schema)| (name.as_str(), schema))
    }

    /// Whether the schema of a tool names a parameter.
    pub(crate) fn has_parameter(&self, tool: &str, parameter: &str) -> bool {
        let schema = self.parameters.get(tool);
        schema.is_some_and(|schema| !schema["properties"][parameter].is_null())
    }

    /// Whether a value that a model wrote without quotes is always a string.
    pub(crate) fn is_text(&self, tool: &str, parameter: &str) -> bool {
        let types = self.types(tool, parameter);
        types.iter().all(|kind| *kind == "string")
    }

    /// The JSON of a value that a model wrote without quotes: its apparent type, if the parameter allows that, and
    /// otherwise a string.
    pub(crate) fn json_of(&self, tool: &str, parameter: &str, text: &str) -> String {
        let types = self.types(tool, parameter);
        // Models that were trained on Python write its constants.
        let json = match text.trim() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            json => json,
        };
        let kind = match serde_json::from_str(json) {
            Ok(Value::String(_)) | Err(_) => "",
            Ok(value) => type_of(&value),
        };
        let may_be = |wanted: &&str| *wanted == kind || (*wanted == "integer" && kind == "number");
        match types.iter().any(may_be) {
            true => json.to_owned(),
            false => Value::from(text).to_string(),
        }
    }

    /// The types that a parameter may have; empty if unknown.
    fn types(&self, tool: &str, parameter: &str) -> Vec<&str> {
        let mut types = Vec::new();
        if let Some(root) = self.parameters.get(tool) {
            collect_types(root, &root["properties"][parameter], 0, &mut types);
        }
        types
    }
}

fn collect_types<'s>(root: &'s Value, schema: &'s Value, depth: usize, types: &mut Vec<&'s str>) {
    if depth > MAX_SCHEMA_DEPTH {
        return;
    }
    match &schema["type"] {
        Value::String(kind) => types.push(kind),
        Value::Array(kinds) => types.extend(kinds.iter().filter_map(Value::as_str)),
        _ => {
            let choices = schema["enum"].as_array().into_iter().flatten();
            let choices = choices.chain(schema.get("const"));
            types.extend(choices.map(|value| -> &'s str { type_of(value) }));
        }
    }
    for alternatives in ["anyOf", "oneOf", "allOf"] {
        for alternative in schema[alternatives].as_array().into_iter().flatten() {
            collect_types(root, alternative, depth + 1, types);
        }
    }
    let reference = schema["$ref"].as_str();
    if let Some(target) = reference.and_then(|path| root.pointer(path.strip_prefix('#')?)) {
        collect_types(root, target, depth + 1, types);
    }
}

/// The type of a value, in the terms of schemas.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_has_a_type_that_its_schema_allows() {
        let schema = json!({
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "flag": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "place": {"$ref": "#/$defs/Place"},
                "level": {"enum": [1, 2]},
            },
            "$defs": {"Place": {"type": "object"}},
        });
        let tools = ToolSet::new([("f".into(), schema)]);
        assert!(tools.is_text("f", "city"));
        assert!(tools.is_text("f", "unknown"));
        assert!(tools.is_text("unknown", "city"));
        assert!(!tools.is_text("f", "note"));
        let json_of = |parameter, text| tools.json_of("f", parameter, text);
        assert_eq!(json_of("city", "12"), "\"12\"");
        assert_eq!(json_of("days", "12"), "12");
        assert_eq!(json_of("days", "soon"), "\"soon\"");
        assert_eq!(json_of("flag", "True"), "true");
        assert_eq!(json_of("note", "null"), "null");
        assert_eq!(json_of("note", "5"), "\"5\"");
        assert_eq!(json_of("level", "2"), "2");
        assert_eq!(json_of("place", "{\"x\": 1}"), "{\"x\": 1}");
    }
}
