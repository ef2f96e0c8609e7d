//! Bounds of the work that a schema asks for. llguidance counts only a part of its work: merging schemas copies them,
//! patterns are compared in pairs, and a row of its parser has an item for each member that may come next.

use std::collections::{BTreeSet, HashMap};
use std::ptr;

use serde_json::{Map, Value};

use super::keyword_list::{list, num_with_all_of, required};
use super::reference_cycle::target;
use super::rewrite::{LISTS, MAPS, SINGLES};
use super::schema_error::error;
use crate::GrammarError;

/// The largest number of optional members in an object. Any of them may come next.
const MAX_OPTIONAL: usize = 500;
/// The same limit for an object with `minProperties` or `maxProperties`, where each number of members is a case of its
/// own.
const MAX_COUNTED: usize = 64;
/// The largest number of members that only `required` names. Each repeats the schema of additional members.
const MAX_UNNAMED: usize = 200;
/// The largest number of pairs of patterns in all `patternProperties`. The patterns of a pair are compared.
const MAX_PATTERN_PAIRS: usize = 4_000;
/// The largest number of digits in all ranges of numbers. Each digit is a case of a regular expression.
const MAX_RANGE_DIGITS: usize = 10_000;
/// The largest number of bytes that merging schemas may copy.
const MAX_COPIED_BYTES: usize = 8 << 20;
/// A pattern that is merged with another one counts as this many bytes: finding whether a text matches both takes long.
const MERGED_PATTERN_BYTES: usize = 32 << 10;
/// The largest number of patterns that one text may have to match.
const MAX_PATTERNS: usize = 12;

/// The requirements of all parts of a schema.
#[derive(Default)]
pub(super) struct Size {
    num_pattern_pairs: usize,
    ranges: BTreeSet<String>,
    num_range_digits: usize,
}

impl Size {
    /// Counts one schema, without the schemas inside it.
    ///
    /// # Errors
    /// The keyword that asks for too much.
    pub(super) fn add(&mut self, fields: &Map<String, Value>) -> Result<(), String> {
        check_members(fields)?;
        if let Some(Value::Object(patterns)) = fields.get("patternProperties") {
            self.num_pattern_pairs += patterns.len() * patterns.len() / 2;
            if self.num_pattern_pairs > MAX_PATTERN_PAIRS {
                return Err(
                    "`patternProperties` has too many patterns, which must be told from each other: use fewer"
                        .to_owned(),
                );
            }
        }
        let [lower, upper] = ["minimum", "maximum"].map(|keyword| {
            fields
                .get(keyword)
                .map(Value::to_string)
                .unwrap_or_default()
        });
        if self.ranges.insert(format!("{lower} {upper}")) {
            self.num_range_digits += lower.len() + upper.len();
            if self.num_range_digits > MAX_RANGE_DIGITS {
                return Err(format!(
                    "`minimum` and `maximum` have more than {MAX_RANGE_DIGITS} digits in the whole schema: use fewer \
                     ranges"
                ));
            }
        }
        Ok(())
    }
}

fn check_members(fields: &Map<String, Value>) -> Result<(), String> {
    let empty = Map::new();
    let properties = fields.get("properties").and_then(Value::as_object);
    let properties = properties.unwrap_or(&empty);
    let required: BTreeSet<_> = required(fields).collect();
    let num_named = required
        .iter()
        .filter(|name| properties.contains_key(**name))
        .count();
    let num_optional = properties.len() - num_named;
    if num_optional > MAX_OPTIONAL {
        return Err(format!(
            "`properties` has {num_optional} members that are not `required`, and at most {MAX_OPTIONAL} are followed"
        ));
    }
    let counts = fields.contains_key("minProperties") || fields.contains_key("maxProperties");
    if counts && num_optional > MAX_COUNTED {
        return Err(format!(
            "`minProperties` and `maxProperties` are followed with at most {MAX_COUNTED} members that are not `required`, \
             and `properties` has {num_optional}"
        ));
    }
    let num_unnamed = required.len() - num_named;
    if num_unnamed > MAX_UNNAMED {
        return Err(format!(
            "`required` has {num_unnamed} members that are not in `properties`, and at most {MAX_UNNAMED} are followed"
        ));
    }
    Ok(())
}

/// # Errors
/// The place of a schema whose parts are too many to be merged.
pub(super) fn check_merging(root: &Value) -> Result<(), GrammarError> {
    let mut merging = Merging {
        root,
        known: HashMap::new(),
        inside: vec![(Vec::new(), root)],
    };
    let mut num_bytes = 0usize;
    let mut visited = BTreeSet::new();
    while let Some((place, part)) = merging.inside.pop() {
        if !visited.insert(ptr::from_ref(part) as usize) {
            continue;
        }
        merging.look_inside(&place, part);
        let Some(fields) = part.as_object() else {
            continue;
        };
        if num_parts(fields) < 2 {
            continue;
        }
        let merged = merging.merged(part);
        if merged.num_patterns > MAX_PATTERNS {
            let reason = format!(
                "`pattern` and `format` of its parts ask for more than {MAX_PATTERNS} patterns of one text: use fewer"
            );
            return Err(error(&place, reason));
        }
        num_bytes = num_bytes.saturating_add(merged.copied());
        if num_bytes > MAX_COPIED_BYTES {
            let reason = "`allOf`, `anyOf` and `$ref` beside other keywords have too many combinations: use fewer cases, \
                          or write them out";
            return Err(error(&place, reason.to_owned()));
        }
    }
    Ok(())
}

/// The number of parts of a schema that describe one value: each schema in `allOf`, then `anyOf`, `oneOf` and `$ref`,
/// and all other keywords together.
fn num_parts(fields: &Map<String, Value>) -> usize {
    let others = [
        "properties",
        "patternProperties",
        "additionalProperties",
        "prefixItems",
    ];
    let others = others.iter().chain(&["items", "pattern", "enum", "const"]);
    num_with_all_of(fields, &["anyOf", "oneOf", "$ref"])
        + usize::from(others.into_iter().any(|key| fields.contains_key(*key)))
}

/// The parts of a schema that describe one value.
#[derive(Clone, Copy)]
struct Merged {
    num_cases: usize,
    /// The bytes of a case.
    num_bytes: usize,
    num_members: usize,
    /// The bytes of the schemas that are copied for each member.
    num_shared_bytes: usize,
    num_patterns: usize,
}

impl Merged {
    fn of(fields: &Map<String, Value>) -> Self {
        let length = |keyword: &str| fields.get(keyword).map_or(0, |part| part.to_string().len());
        let count = |keyword: &str| match fields.get(keyword) {
            Some(Value::Object(parts)) => parts.len(),
            Some(Value::Array(parts)) => parts.len(),
            _ => 0,
        };
        let shared = [
            "patternProperties",
            "additionalProperties",
            "items",
            "additionalItems",
        ];
        let num_shared_bytes = shared.map(length).into_iter().sum();
        let own = ["properties", "prefixItems", "required", "const"].map(length);
        Self {
            num_cases: count("enum").max(1),
            num_bytes: own.into_iter().sum::<usize>() + num_shared_bytes + 100,
            num_members: count("properties") + count("prefixItems") + count("required"),
            num_shared_bytes,
            num_patterns: ["pattern", "format"]
                .iter()
                .filter(|keyword| fields.contains_key(**keyword))
                .count(),
        }
    }

    fn and(&mut self, other: Self) {
        self.num_cases = self.num_cases.saturating_mul(other.num_cases);
        self.num_bytes = self.num_bytes.saturating_add(other.num_bytes);
        self.num_members = self.num_members.saturating_add(other.num_members);
        self.num_shared_bytes = self.num_shared_bytes.saturating_add(other.num_shared_bytes);
        self.num_patterns = self.num_patterns.saturating_add(other.num_patterns);
    }

    fn or(self, other: Self) -> Self {
        Self {
            num_cases: self.num_cases.saturating_add(other.num_cases),
            num_bytes: self.num_bytes.max(other.num_bytes),
            num_members: self.num_members.max(other.num_members),
            num_shared_bytes: self.num_shared_bytes.max(other.num_shared_bytes),
            num_patterns: self.num_patterns.max(other.num_patterns),
        }
    }

    fn copied(&self) -> usize {
        let members = self.num_members.saturating_mul(self.num_shared_bytes);
        let patterns = match self.num_patterns {
            0 | 1 => 0,
            several => several * MERGED_PATTERN_BYTES,
        };
        let case = self
            .num_bytes
            .saturating_add(members)
            .saturating_add(patterns);
        self.num_cases.saturating_mul(case)
    }
}

struct Merging<'a> {
    root: &'a Value,
    known: HashMap<*const Value, Option<Merged>>,
    inside: Vec<(Vec<String>, &'a Value)>,
}

impl<'a> Merging<'a> {
    fn merged(&mut self, schema: &'a Value) -> Merged {
        let nothing = Merged::of(&Map::new());
        let Some(fields) = schema.as_object() else {
            return nothing;
        };
        match self.known.get(&ptr::from_ref(schema)) {
            Some(Some(merged)) => return *merged,
            // Circular references are refused elsewhere.
            Some(None) => return nothing,
            None => {}
        }
        self.known.insert(schema, None);
        let mut merged = Merged::of(fields);
        for keyword in ["anyOf", "oneOf"] {
            let cases = list(fields, keyword).iter().map(|part| self.merged(part));
            let cases = cases.reduce(Merged::or);
            cases.into_iter().for_each(|cases| merged.and(cases));
        }
        for part in list(fields, "allOf") {
            merged.and(self.merged(part));
        }
        let reference = fields.get("$ref").and_then(Value::as_str);
        if let Some(target) = reference.and_then(|reference| target(self.root, reference)) {
            merged.and(self.merged(target));
        }
        self.known.insert(schema, Some(merged));
        merged
    }

    /// Lists the schemas directly within a schema.
    fn look_inside(&mut self, place: &[String], schema: &'a Value) {
        let Some(fields) = schema.as_object() else {
            return;
        };
        let below = |step: String| {
            let mut place = place.to_vec();
            place.push(step);
            place
        };
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                (keyword, Value::Object(parts)) if MAPS.contains(&keyword) => {
                    let parts = parts.iter();
                    self.inside.extend(
                        parts.map(|(name, part)| (below(format!("{keyword}.{name}")), part)),
                    );
                }
                (keyword, Value::Array(parts)) if LISTS.contains(&keyword) => {
                    let parts = parts.iter().enumerate();
                    self.inside
                        .extend(parts.map(|(at, part)| (below(format!("{keyword}[{at}]")), part)));
                }
                (keyword, part) if SINGLES.contains(&keyword) => {
                    self.inside.push((below(keyword.to_owned()), part));
                }
                ("$ref", Value::String(reference)) => {
                    if let Some(target) = target(self.root, reference) {
                        self.inside.push((vec![reference.clone()], target));
                    }
                }
                _ => {}
            }
        }
    }
}
