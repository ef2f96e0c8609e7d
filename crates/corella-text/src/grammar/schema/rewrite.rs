//! Replaces keywords that llguidance lacks, or refuses, by others that it follows.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::keyword_list::required;
use super::look_around::without_look_ahead;
use super::number::{StepSet, set_numbers};
use super::reference_cycle::steps;
use super::schema_error::{error, shortened};
use super::size::Size;
use crate::GrammarError;

/// Keywords without an effect on the answer.
const ANNOTATIONS: [&str; 4] = ["title", "description", "$comment", "examples"];

/// The values of `format` that llguidance follows. `unknown` is llguidance's name for any text.
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
    let mut rewriting = Rewriting::default();
    rewriting.rewrite(&mut schema)?;
    // A reference may lead to a place where no schema is looked for otherwise, such as OpenAPI's `components`.
    while let Some(reference) = rewriting.references.pop() {
        if rewriting.followed.insert(reference.clone())
            && !is_inside(&schema, &reference)
            && let Some(target) = target_mut(&mut schema, &reference)
        {
            rewriting.place = steps(&reference).map(str::to_owned).collect();
            rewriting.rewrite(target)?;
        }
    }
    rewriting
        .steps
        .check()
        .map_err(|reason| error(&[], reason))?;
    Ok(schema)
}

#[derive(Default)]
struct Rewriting {
    place: Vec<String>,
    references: Vec<String>,
    followed: HashSet<String>,
    steps: StepSet,
    size: Size,
}

impl Rewriting {
    fn rewrite(&mut self, schema: &mut Value) -> Result<(), GrammarError> {
        let Some(fields) = schema.as_object_mut() else {
            return Ok(());
        };
        for (keyword, value) in fields.iter_mut() {
            match (keyword.as_str(), value) {
                (keyword, Value::Object(parts)) if MAPS.contains(&keyword) => {
                    for (name, part) in parts.iter_mut() {
                        self.rewrite_at(part, format!("{keyword}.{name}"))?;
                    }
                }
                (keyword, Value::Array(parts)) if LISTS.contains(&keyword) => {
                    for (at, part) in parts.iter_mut().enumerate() {
                        self.rewrite_at(part, format!("{keyword}[{at}]"))?;
                    }
                }
                (keyword, part) if SINGLES.contains(&keyword) => {
                    self.rewrite_at(part, keyword.to_owned())?;
                }
                ("$ref", Value::String(reference)) => self.references.push(reference.clone()),
                _ => {}
            }
        }
        self.rewrite_here(fields)
            .map_err(|reason| error(&self.place, reason))?;
        // Zod's `z.never()`.
        if fields
            .get("not")
            .is_some_and(|not| *not == json!({}) || *not == true)
        {
            *schema = Value::Bool(false);
        }
        Ok(())
    }

    fn rewrite_at(&mut self, part: &mut Value, step: String) -> Result<(), GrammarError> {
        self.place.push(step);
        self.rewrite(part)?;
        self.place.pop();
        Ok(())
    }

    fn rewrite_here(&mut self, fields: &mut Map<String, Value>) -> Result<(), String> {
        set_format(fields);
        set_pattern(fields)?;
        set_property_names(fields)?;
        set_numbers(fields)?;
        check_required(fields)?;
        self.steps.add(fields);
        self.size.add(fields)
    }
}

/// Keywords with named schemas, with a list of schemas, and with one schema.
pub(super) const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
pub(super) const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
pub(super) const SINGLES: [&str; 3] = ["items", "additionalItems", "additionalProperties"];

/// Whether a reference leads to a schema that is found without it.
fn is_inside(root: &Value, reference: &str) -> bool {
    let mut steps = steps(reference);
    let mut part = root;
    while let Some(keyword) = steps.next() {
        let Some(value) = part.get(keyword) else {
            return false;
        };
        part = match value {
            Value::Object(parts) if MAPS.contains(&keyword) => {
                match steps.next().and_then(|name| parts.get(name)) {
                    Some(part) => part,
                    None => return false,
                }
            }
            Value::Array(parts) if LISTS.contains(&keyword) => {
                let at = steps.next().and_then(|at| at.parse::<usize>().ok());
                match at.and_then(|at| parts.get(at)) {
                    Some(part) => part,
                    None => return false,
                }
            }
            part if SINGLES.contains(&keyword) => part,
            _ => return false,
        };
    }
    true
}

fn target_mut<'a>(root: &'a mut Value, reference: &str) -> Option<&'a mut Value> {
    if !reference.starts_with('#') {
        return None;
    }
    steps(reference).try_fold(root, |part, step| match part {
        Value::Array(parts) => parts.get_mut(step.parse::<usize>().ok()?),
        part => part.get_mut(step),
    })
}

/// Refuses required members that no object may have. Validators refuse every answer to such a schema, and llguidance
/// calls it unsatisfiable.
fn check_required(fields: &Map<String, Value>) -> Result<(), String> {
    let is_closed = fields.get("additionalProperties") == Some(&Value::Bool(false))
        && !fields.contains_key("patternProperties");
    let properties = fields.get("properties").and_then(Value::as_object);
    let unnamed = required(fields)
        .find(|name| !properties.is_some_and(|members| members.contains_key(*name)));
    match unnamed.filter(|_| is_closed) {
        Some(name) => Err(format!(
            "`required` names `{}`, which `additionalProperties` excludes, so that no answer is valid: add it to \
             `properties`",
            shortened(name)
        )),
        None => Ok(()),
    }
}

/// Removes formats that any text has, and formats that llguidance lacks beside a pattern: Zod writes `"format": "cuid"`
/// together with the pattern of cuids.
fn set_format(fields: &mut Map<String, Value>) {
    let Some(format) = fields.get("format").and_then(Value::as_str) else {
        return;
    };
    let is_spelled_out = !KNOWN_FORMATS.contains(&format) && fields.contains_key("pattern");
    if FREE_FORMATS.contains(&format) || is_spelled_out {
        fields.shift_remove("format");
    }
}

/// Replaces a pattern's look-aheads by separate patterns.
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

/// The pattern of the names that a schema allows: `Some(None)` if the schema allows all names, `None` if the pattern is
/// unknown.
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
    let mut keywords = names.iter().filter(|(keyword, _)| {
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
    text.chars()
        .map(|c| match is_plain(c) {
            true => c.to_string(),
            false => format!("\\x{{{:x}}}", u32::from(c)),
        })
        .collect()
}
