//! Replaces keywords that llguidance lacks, or refuses, by others that it follows.

use serde_json::{Map, Value, json};

use super::error;
use super::look_around::without_look_ahead;
use crate::GrammarError;

/// Keywords without an effect on the answer.
const ANNOTATIONS: [&str; 4] = ["title", "description", "$comment", "examples"];

/// The values of `format` that llguidance follows. `unknown` is its own name for any text.
const KNOWN_FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Values of `format` that any text has: OpenAPI's, and Pydantic's for paths.
const FREE_FORMATS: [&str; 5] = ["password", "binary", "path", "file-path", "directory-path"];

pub(super) fn rewritten(schema: &Value) -> Result<Value, GrammarError> {
    let mut schema = schema.clone();
    rewrite(&mut schema, &mut Vec::new())?;
    Ok(schema)
}

fn rewrite(schema: &mut Value, place: &mut Vec<String>) -> Result<(), GrammarError> {
    let Some(fields) = schema.as_object_mut() else {
        return Ok(());
    };
    for (keyword, value) in fields.iter_mut() {
        match (keyword.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(parts),
            ) => {
                for (name, part) in parts.iter_mut() {
                    rewrite_at(part, place, format!("{keyword}.{name}"))?;
                }
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(parts)) => {
                for (at, part) in parts.iter_mut().enumerate() {
                    rewrite_at(part, place, format!("{keyword}[{at}]"))?;
                }
            }
            ("items" | "additionalItems" | "additionalProperties", part) => {
                rewrite_at(part, place, keyword.clone())?;
            }
            _ => {}
        }
    }
    set_format(fields);
    set_pattern(fields).map_err(|reason| error(place, reason))?;
    set_property_names(fields).map_err(|reason| error(place, reason))?;
    // Zod's `z.never()`.
    if { fields.get("not") }.is_some_and(|not| *not == json!({}) || *not == true) {
        *schema = Value::Bool(false);
    }
    Ok(())
}

fn rewrite_at(part: &mut Value, place: &mut Vec<String>, step: String) -> Result<(), GrammarError> {
    place.push(step);
    rewrite(part, place)?;
    place.pop();
    Ok(())
}

/// Removes formats that narrow nothing, or that a pattern beside them spells out: Zod writes both `"format": "cuid"`
/// and its pattern.
fn set_format(fields: &mut Map<String, Value>) {
    let Some(format) = fields.get("format").and_then(Value::as_str) else {
        return;
    };
    let is_spelled_out = !KNOWN_FORMATS.contains(&format) && fields.contains_key("pattern");
    if FREE_FORMATS.contains(&format) || is_spelled_out {
        fields.shift_remove("format");
    }
}

/// Makes separate patterns of a pattern's look-aheads.
fn set_pattern(fields: &mut Map<String, Value>) -> Result<(), String> {
    let Some(pattern) = fields.get("pattern").and_then(Value::as_str) else {
        return Ok(());
    };
    let Some(mut patterns) = without_look_ahead(pattern)? else {
        return Ok(());
    };
    fields["pattern"] = patterns.remove(0).into();
    if patterns.is_empty() {
        return Ok(());
    }
    let kind = fields.get("type").cloned();
    let others = patterns.into_iter().map(|pattern| {
        let mut part = Map::new();
        part.extend(kind.clone().map(|kind| ("type".to_owned(), kind)));
        part.insert("pattern".to_owned(), pattern.into());
        Value::Object(part)
    });
    let all = fields.entry("allOf").or_insert_with(|| json!([]));
    if let Some(all) = all.as_array_mut() {
        all.extend(others);
    }
    Ok(())
}

/// Removes the condition that names are strings, and rewrites conditions on names as `patternProperties`: Zod writes
/// `propertyNames` for each record.
fn set_property_names(fields: &mut Map<String, Value>) -> Result<(), String> {
    let Some(names) = fields.get("propertyNames") else {
        return Ok(());
    };
    let pattern = names_pattern(names);
    if pattern == Some(None) {
        fields.shift_remove("propertyNames");
        return Ok(());
    }
    let is_alone = !fields.contains_key("properties") && !fields.contains_key("patternProperties");
    let Some(Some(pattern)) = pattern.filter(|_| is_alone) else {
        return Err(
            "`propertyNames` is followed with `enum`, `const` or `pattern` only, and without `properties` or \
             `patternProperties` beside it: name the members in `properties` instead"
                .to_owned(),
        );
    };
    fields.shift_remove("propertyNames");
    let value = fields.shift_remove("additionalProperties");
    let value = value.unwrap_or(Value::Bool(true));
    fields.insert("patternProperties".to_owned(), json!({ pattern: value }));
    fields.insert("additionalProperties".to_owned(), Value::Bool(false));
    Ok(())
}

/// The pattern of the names that a schema allows: `Some(None)` if it allows all, `None` if unknown.
fn names_pattern(names: &Value) -> Option<Option<String>> {
    let names = match names {
        Value::Bool(true) => return Some(None),
        Value::Object(names) => names,
        _ => return None,
    };
    let is_string = |kind: &Value| kind == "string";
    if !names.get("type").is_none_or(is_string) {
        return None;
    }
    let mut keywords = { names.iter() }.filter(|(keyword, _)| {
        let keyword = keyword.as_str();
        keyword != "type" && !ANNOTATIONS.contains(&keyword)
    });
    let Some((keyword, value)) = keywords.next() else {
        return Some(None);
    };
    if keywords.next().is_some() {
        return None;
    }
    let exact = |texts: &[Value]| {
        let texts: Option<Vec<_>> = texts.iter().map(Value::as_str).collect();
        let texts: Vec<_> = texts?.into_iter().map(literal_pattern).collect();
        Some(Some(format!("^(?:{})$", texts.join("|"))))
    };
    match (keyword.as_str(), value) {
        ("enum", Value::Array(texts)) if !texts.is_empty() => exact(texts),
        ("const", text) => exact(std::slice::from_ref(text)),
        ("pattern", Value::String(pattern)) => match without_look_ahead(pattern) {
            Ok(None) => Some(Some(pattern.clone())),
            _ => None,
        },
        _ => None,
    }
}

/// A pattern of just this text.
fn literal_pattern(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | ' ');
    { text.chars() }
        .map(|c| match is_plain(c) {
            true => c.to_string(),
            false => format!("\\x{{{:x}}}", u32::from(c)),
        })
        .collect()
}
