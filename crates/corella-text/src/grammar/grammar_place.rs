//! Finds the place of an error in a JSON schema that does not compile.

use serde_json::{Map, Value};

/// The largest number of parts that are compiled alone in search of an error.
const MAX_TRIES: usize = 64;

/// The path to the innermost part of `schema` that fails alone for the same reason. `error_of` compiles a part and
/// returns its error. References from a part to definitions of the whole schema stay valid.
pub(crate) fn place_of_error(
    schema: &Value,
    reason: &str,
    error_of: impl Fn(Value) -> Option<String>,
) -> String {
    let mut path = Vec::new();
    let mut part = schema;
    let mut num_tries = 0;
    while let Some((step, inner)) = parts(part).into_iter().find(|(_, inner)| {
        num_tries += 1;
        let alone = with_definitions(inner, schema);
        num_tries <= MAX_TRIES && error_of(alone).as_deref() == Some(reason)
    }) {
        path.push(step);
        part = inner;
    }
    path.join(".")
}

/// The schemas directly inside a schema, with their paths. Definitions come first, because a schema that refers to a
/// wrong definition fails, too.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let Some(fields) = schema.as_object() else {
        return Vec::new();
    };
    let (mut definitions, mut parts) = (Vec::new(), Vec::new());
    for (key, value) in fields {
        match (key.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(inner)) => {
                let named = inner.iter();
                parts.extend(named.map(|(name, schema)| (format!("{key}.{name}"), schema)));
            }
            ("$defs" | "definitions", Value::Object(inner)) => {
                let named = inner.iter();
                definitions.extend(named.map(|(name, schema)| (format!("{key}.{name}"), schema)));
            }
            ("items" | "additionalItems" | "additionalProperties", Value::Object(_)) => {
                parts.push((key.clone(), value));
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(inner)) => {
                let listed = inner.iter().enumerate();
                parts.extend(listed.map(|(at, schema)| (format!("{key}[{at}]"), schema)));
            }
            _ => {}
        }
    }
    definitions.append(&mut parts);
    definitions
}

fn with_definitions(part: &Value, whole: &Value) -> Value {
    let mut part = part.clone();
    let empty = Map::new();
    let whole = whole.as_object().unwrap_or(&empty);
    if let Some(fields) = part.as_object_mut() {
        for key in ["$defs", "definitions", "$schema", "$id"] {
            if let Some(value) = whole.get(key)
                && !fields.contains_key(key)
            {
                fields.insert(key.to_owned(), value.clone());
            }
        }
    }
    part
}
