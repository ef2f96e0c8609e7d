//! Calls in Python as grammars: `name(key=value, …)`, with values as JSON, which the parser of LFM2's calls reads, too.

use serde_json::Value;

use super::member_grammar::{Members, refers_to_definitions};
use super::reply_grammar::{GrammarOrigin, GrammarWriter};
use super::tagged_grammar::{resolved, with_definitions};
use crate::grammar::grammar_source::GrammarSource;

impl GrammarWriter {
    /// A call in Python; `None` if the schema has conditions beyond its arguments. Arguments follow the order of the
    /// schema.
    pub(crate) fn python_call(&mut self, rule: &str, name: &str, schema: &Value) -> Option<String> {
        if schema.is_null() {
            return Some(self.text(&format!("{name}()")));
        }
        if !refers_to_definitions(schema) {
            return None;
        }
        let object = resolved(schema, schema);
        let members = match object.as_object() {
            Some(object) if !object.contains_key("properties") => return None,
            _ => Members::of(object, is_name)?,
        };
        let mut arguments = Vec::new();
        for (key, property) in members.iter() {
            let source = GrammarSource::JsonSchema(with_definitions(property.clone(), schema));
            let origin = GrammarOrigin::Tool(name.to_owned());
            let value = self.part(source, origin, format!("properties.{key}"));
            let argument = format!("{} {value}", self.text(&format!("{key}=")));
            arguments.push((argument, members.is_required(key)));
        }
        let arguments = self.members(rule, &arguments, ", ");
        let [begin, end] = [format!("{name}("), ")".to_owned()].map(|text| self.text(&text));
        Some(format!("{begin} {arguments} {end}"))
    }
}

/// Whether an argument may have this name.
fn is_name(key: &str) -> bool {
    let begins = key.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
