//! Finds references in a JSON schema that lead back to themselves before any part of an answer is read. Such a schema
//! has no meaning, and a parser would follow it for ever. The schema of a tree, whose nodes refer to it from within
//! their members, has no such cycle.

use std::collections::HashMap;
use std::ptr;

use serde_json::Value;

use super::schema_error::error;
use crate::GrammarError;

/// # Errors
/// The place of a reference in a cycle, and the references of the cycle.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut walk = Walk {
        root: schema,
        states: HashMap::new(),
        references: Vec::new(),
        inside: vec![(Vec::new(), schema)],
    };
    while let Some((place, part)) = walk.inside.pop() {
        walk.visit(&place, part)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Schemas on the way to the current one, with the number of references before each.
    Open(usize),
    Closed,
}

struct Walk<'a> {
    root: &'a Value,
    states: HashMap<*const Value, State>,
    /// The references that lead to the current schema.
    references: Vec<&'a str>,
    /// The unvisited schemas of members and items. They describe a smaller part of the answer, so no cycle leads
    /// through them.
    inside: Vec<(Vec<String>, &'a Value)>,
}

impl<'a> Walk<'a> {
    /// Visits a schema, and the others that describe the same part of the answer.
    fn visit(&mut self, place: &[String], schema: &'a Value) -> Result<(), GrammarError> {
        let key = ptr::from_ref(schema);
        match self.states.get(&key) {
            Some(State::Closed) => return Ok(()),
            Some(State::Open(num_references)) => {
                let cycle = self.references[*num_references..].join("`, then `");
                let reason = format!(
                    "`$ref` leads back to itself by `{cycle}`, and nothing on the way describes a part of the answer"
                );
                return Err(error(place, reason));
            }
            None => {}
        }
        let Some(fields) = schema.as_object() else {
            return Ok(());
        };
        self.states.insert(key, State::Open(self.references.len()));
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("allOf" | "anyOf" | "oneOf", Value::Array(parts)) => {
                    for (at, part) in parts.iter().enumerate() {
                        self.visit(&below(place, format!("{keyword}[{at}]")), part)?;
                    }
                }
                ("$ref", Value::String(reference)) => {
                    if let Some(target) = target(self.root, reference) {
                        let place: Vec<_> = steps(reference).map(str::to_owned).collect();
                        self.references.push(reference);
                        self.visit(&place, target)?;
                        self.references.pop();
                    }
                }
                ("properties" | "patternProperties", Value::Object(parts)) => {
                    let parts = parts
                        .iter()
                        .map(|(name, part)| (below(place, format!("{keyword}.{name}")), part));
                    self.inside.extend(parts);
                }
                ("prefixItems" | "items", Value::Array(parts)) => {
                    let parts = parts
                        .iter()
                        .enumerate()
                        .map(|(at, part)| (below(place, format!("{keyword}[{at}]")), part));
                    self.inside.extend(parts);
                }
                ("items" | "additionalItems" | "additionalProperties", part) => {
                    self.inside.push((below(place, keyword.clone()), part));
                }
                _ => {}
            }
        }
        self.states.insert(key, State::Closed);
        Ok(())
    }
}

fn below(place: &[String], step: String) -> Vec<String> {
    let mut place = place.to_vec();
    place.push(step);
    place
}

/// The part of the schema that llguidance finds for a reference.
pub(super) fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if !reference.starts_with("#/") && reference != "#" {
        return None;
    }
    steps(reference).try_fold(root, |part, step| match part {
        Value::Array(parts) => parts.get(step.parse::<usize>().ok()?),
        part => part.get(step),
    })
}

pub(super) fn steps(reference: &str) -> impl Iterator<Item = &str> {
    let path = reference.trim_start_matches('#').trim_start_matches('/');
    path.split('/').filter(|step| !step.is_empty())
}
