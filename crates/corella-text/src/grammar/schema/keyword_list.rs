//! Lists in a schema, by their keywords.

use serde_json::{Map, Value};

/// The list of a keyword; empty without one.
pub(super) fn list<'a>(fields: &'a Map<String, Value>, keyword: &str) -> &'a [Value] {
    let list = fields.get(keyword).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

/// The names of required members.
pub(super) fn required(fields: &Map<String, Value>) -> impl Iterator<Item = &str> {
    list(fields, "required").iter().filter_map(Value::as_str)
}

/// The number of schemas in `allOf`, and of the other keywords in use.
pub(super) fn num_with_all_of(fields: &Map<String, Value>, others: &[&str]) -> usize {
    let others = others.iter().filter(|key| fields.contains_key(**key));
    list(fields, "allOf").len() + others.count()
}
