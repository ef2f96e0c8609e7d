//! Objects whose members are written one by one, with a separator between them.

use serde_json::{Map, Value};

use super::reply_grammar::GrammarWriter;
use super::tagged_grammar::{
    ALTERNATIVES, DEFINITIONS, OBJECT_KEYWORDS, is_annotation, resolved, unknown_keyword,
};

/// The members that the schema of an object has.
pub(crate) struct Members<'s> {
    properties: &'s Map<String, Value>,
    required: Vec<&'s str>,
}

impl<'s> Members<'s> {
    /// The members of an object without further conditions; `None` if a schema has more, or if a name cannot be written
    /// without quotes.
    pub(crate) fn of(schema: &'s Value, may_be_key: impl Fn(&str) -> bool) -> Option<Self> {
        let known = |key: &str| OBJECT_KEYWORDS.contains(&key) || is_annotation(key);
        if unknown_keyword(schema, known).is_some() || schema["additionalProperties"].is_object() {
            return None;
        }
        let properties = schema["properties"].as_object()?;
        let required = schema["required"].as_array().into_iter().flatten();
        let required: Vec<_> = required.filter_map(Value::as_str).collect();
        let is_known = |name: &&str| properties.contains_key(*name);
        let is_followed =
            required.iter().all(is_known) && properties.keys().all(|key| may_be_key(key));
        is_followed.then_some(Self {
            properties,
            required,
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'s str, &'s Value)> {
        self.properties
            .iter()
            .map(|(key, schema)| (key.as_str(), schema))
    }

    pub(crate) fn is_required(&self, key: &str) -> bool {
        self.required.contains(&key)
    }
}

impl GrammarWriter {
    /// Adds rules for members in their order, and returns the reference to them. A member that is not required may be
    /// missing.
    pub(crate) fn members(
        &mut self,
        rule: &str,
        members: &[(String, bool)],
        separator: &str,
    ) -> String {
        let separator = self.text(separator);
        self.rule(&format!("{rule}_first{}", members.len()), "\"\"");
        self.rule(&format!("{rule}_more{}", members.len()), "\"\"");
        for (index, (member, is_required)) in members.iter().enumerate().rev() {
            let next = index + 1;
            self.rule(&format!("{rule}_member{index}"), member);
            let (skipped, optional) = match is_required {
                true => (String::new(), ""),
                false => (format!("| {rule}_first{next}"), "?"),
            };
            self.rule(
                &format!("{rule}_first{index}"),
                &format!("{rule}_member{index} {rule}_more{next} {skipped}"),
            );
            self.rule(
                &format!("{rule}_more{index}"),
                &format!("({separator} {rule}_member{index}){optional} {rule}_more{next}"),
            );
        }
        format!("{rule}_first0")
    }
}

/// Whether all references of a schema lead to definitions, so that a part of it needs only these.
pub(crate) fn refers_to_definitions(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => members.iter().all(|(key, value)| match value {
            Value::String(path) if key == "$ref" => {
                let path = path.strip_prefix("#/").unwrap_or_default();
                DEFINITIONS
                    .iter()
                    .any(|name| path.split('/').next() == Some(name))
            }
            value => refers_to_definitions(value),
        }),
        Value::Array(items) => items.iter().all(refers_to_definitions),
        _ => true,
    }
}

/// The alternatives of a schema without further conditions.
pub(crate) fn alternatives<'s>(root: &'s Value, schema: &'s Value) -> Option<&'s [Value]> {
    let schema = resolved(root, schema);
    let keyword = ALTERNATIVES
        .iter()
        .find(|&&keyword| schema[keyword].is_array())?;
    let known = |key: &str| key == *keyword || is_annotation(key);
    match unknown_keyword(schema, known) {
        None => schema[*keyword].as_array().map(Vec::as_slice),
        Some(_) => None,
    }
}
