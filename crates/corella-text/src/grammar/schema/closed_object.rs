//! Closes objects: an answer has only the members that the schema names, unless `additionalProperties` or
//! `patternProperties` allows others. In an open object, a model would invent members up to the limit of tokens.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value, json};

use super::keyword_list::{list, num_with_all_of, required};
use super::schema_error::error;
use crate::GrammarError;

/// Closes the objects of a schema, at every depth.
///
/// # Errors
/// The place of an object whose parts name too many members together.
pub(super) fn closed(mut schema: Value) -> Result<Value, GrammarError> {
    let root = schema.clone();
    let mut open = BTreeSet::new();
    find_parts(&root, &root, false, &mut open);
    let mut closing = Closing {
        root: &root,
        open,
        num_visits: 0,
    };
    closing.close(&mut schema, "#", false)?;
    Ok(schema)
}

/// The largest number of names and parts that are visited to find the members of objects with several parts. A part is
/// visited again for each object that refers to it.
const MAX_VISITS: usize = 100_000;

/// Keywords whose schemas describe the same value as the schema around them.
const PARTS: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// The number of parts of a schema that together describe the members of one value.
fn num_sources(fields: &Map<String, Value>) -> usize {
    num_with_all_of(fields, &["properties", "anyOf", "oneOf", "$ref"])
}

/// The schema of a reference.
fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(reference.strip_prefix('#')?)
}

/// Records the targets of references that describe only a part of a value. If such a target were closed, it would
/// exclude the members of the other parts.
fn find_parts(schema: &Value, root: &Value, is_part: bool, open: &mut BTreeSet<String>) {
    let Some(fields) = schema.as_object() else {
        return;
    };
    let is_combined = is_part || num_sources(fields) > 1;
    if let Some(reference) = fields.get("$ref").and_then(Value::as_str)
        && is_combined
        && open.insert(reference.to_owned())
        && let Some(target) = target(root, reference)
    {
        find_parts(target, root, true, open);
    }
    for keyword in PARTS {
        for part in list(fields, keyword) {
            find_parts(part, root, is_combined, open);
        }
    }
    for (_, inner) in inner_schemas(fields) {
        find_parts(inner, root, false, open);
    }
}

/// The schemas of other values within a value: members, items and definitions, with their places.
fn inner_schemas(fields: &Map<String, Value>) -> Vec<(String, &Value)> {
    let mut inner = Vec::new();
    for (keyword, value) in fields {
        match (keyword.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(parts),
            ) => {
                let parts = parts.iter();
                inner.extend(
                    parts.map(|(name, part)| (format!("{keyword}/{}", escaped(name)), part)),
                );
            }
            ("prefixItems" | "items", Value::Array(parts)) => {
                let parts = parts.iter().enumerate();
                inner.extend(parts.map(|(at, part)| (format!("{keyword}/{at}"), part)));
            }
            ("items" | "additionalItems" | "additionalProperties", part) => {
                inner.push((keyword.clone(), part));
            }
            _ => {}
        }
    }
    inner
}

/// A name as a step of a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

struct Closing<'a> {
    root: &'a Value,
    /// The references to schemas that stay open.
    open: BTreeSet<String>,
    num_visits: usize,
}

impl Closing<'_> {
    /// `place` is the reference to the schema.
    fn close(
        &mut self,
        schema: &mut Value,
        place: &str,
        is_part: bool,
    ) -> Result<(), GrammarError> {
        let Some(fields) = schema.as_object() else {
            return Ok(());
        };
        let is_part = is_part || self.open.contains(place);
        let is_combined = is_part || num_sources(fields) > 1;
        let inner: Vec<_> = inner_schemas(fields)
            .into_iter()
            .map(|(step, _)| (step, false))
            .collect();
        let parts = PARTS.into_iter().flat_map(|keyword| {
            let num_parts = list(fields, keyword).len();
            (0..num_parts).map(move |at| (format!("{keyword}/{at}"), is_combined))
        });
        for (step, is_part) in inner.into_iter().chain(parts).collect::<Vec<_>>() {
            if let Some(inner) = schema.pointer_mut(&format!("/{step}")) {
                self.close(inner, &format!("{place}/{step}"), is_part)?;
            }
        }
        if !is_part {
            self.close_here(schema);
        }
        if self.num_visits > MAX_VISITS {
            let place: Vec<_> = place.split('/').skip(1).map(str::to_owned).collect();
            let reason =
                "its parts in `allOf`, `anyOf`, `oneOf` and `$ref` name too many members together";
            return Err(error(&place, reason.to_owned()));
        }
        Ok(())
    }

    fn close_here(&mut self, schema: &mut Value) {
        let Some(fields) = schema.as_object() else {
            return;
        };
        let reference = fields.get("$ref").and_then(Value::as_str);
        let refers_to_open = reference.is_some_and(|reference| self.open.contains(reference));
        let is_whole = num_sources(fields) == 1;
        if is_whole && !refers_to_open && !fields.contains_key("properties") {
            return;
        }
        let Some(names) = self.names(schema) else {
            return;
        };
        let Some(fields) = schema.as_object_mut() else {
            return;
        };
        if is_whole && let Some(Value::Object(properties)) = fields.get_mut("properties") {
            for name in names {
                properties.entry(name).or_insert_with(|| json!({}));
            }
            fields.insert("additionalProperties".to_owned(), false.into());
        } else if !is_whole || refers_to_open {
            let properties = names.into_iter().map(|name| (name, json!({})));
            let all = Map::from_iter(properties);
            let bound = json!({"properties": all, "additionalProperties": false});
            let parts = fields.entry("allOf").or_insert_with(|| json!([]));
            if let Some(parts) = parts.as_array_mut() {
                parts.push(bound);
            }
        }
    }

    /// The names of all members in a schema. `None` if it names none, or allows others.
    fn names(&mut self, schema: &Value) -> Option<Vec<String>> {
        let mut names = Names::default();
        let is_named = self.add_names(schema, &mut names);
        self.num_visits += names.num_visits;
        let is_named = is_named?;
        (is_named && !is_too_few(schema, names.list.len())).then_some(names.list)
    }

    /// Whether the schema lists members. `None` if it allows others.
    fn add_names(&self, schema: &Value, names: &mut Names) -> Option<bool> {
        names.num_visits += 1;
        if self.num_visits + names.num_visits > MAX_VISITS {
            return None;
        }
        let Some(fields) = schema.as_object() else {
            return Some(false);
        };
        let speaks_of_others = fields.contains_key("patternProperties")
            || fields
                .get("additionalProperties")
                .is_some_and(|others| *others != false);
        if speaks_of_others {
            return None;
        }
        let mut is_named = false;
        if let Some(Value::Object(properties)) = fields.get("properties") {
            properties.keys().for_each(|name| names.add(name));
            is_named = true;
        }
        required(fields).for_each(|name| names.add(name));
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str)
            && names.references.insert(reference.to_owned())
        {
            let target = target(self.root, reference)?;
            is_named |= self.add_names(target, names)?;
        }
        for keyword in PARTS {
            for part in list(fields, keyword) {
                is_named |= self.add_names(part, names)?;
            }
        }
        Some(is_named)
    }
}

/// Names of members in the order of their discovery.
#[derive(Default)]
struct Names {
    list: Vec<String>,
    known: HashSet<String>,
    /// The references that were followed. Each is followed only once, because definitions that refer to others twice
    /// would take exponential time.
    references: HashSet<String>,
    num_visits: usize,
}

impl Names {
    fn add(&mut self, name: &str) {
        self.num_visits += 1;
        if self.known.insert(name.to_owned()) {
            self.list.push(name.to_owned());
        }
    }
}

/// Whether `minProperties` asks for more members than the schema names.
fn is_too_few(schema: &Value, num_names: usize) -> bool {
    let least = schema.get("minProperties").and_then(Value::as_u64);
    least.is_some_and(|least| least > num_names as u64)
}
