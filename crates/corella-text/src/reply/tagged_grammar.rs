//! Calls in tags (`call_tags`) as grammars. Strings have no quotes, so that a schema is followed parameter by parameter.

use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::call_tags::CallTags;
use super::reply_grammar::{GrammarOrigin, GrammarWriter, ReplyGrammarError, literal};
use crate::GrammarError;
use crate::grammar::grammar_size::nesting_error;
use crate::grammar::grammar_source::GrammarSource;

/// The keywords of an object's schema that tags can follow, and annotations.
pub(crate) const OBJECT_KEYWORDS: [&str; 4] =
    ["type", "properties", "required", "additionalProperties"];
pub(crate) const STRING_KEYWORDS: [&str; 7] = [
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "pattern",
    "format",
];
const ANNOTATIONS: [&str; 11] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
];
pub(crate) const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];
/// The places of schemas that references lead to.
pub(crate) const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// The longest chain of references to a schema.
const MAX_REFERENCES: usize = 16;
/// The largest number of schemas in a parameter, including those of references.
pub(crate) const MAX_SCHEMAS: usize = 256;

/// The parameter of the current grammar.
struct Parameter<'a> {
    tags: &'static CallTags,
    tool: &'a str,
    /// The whole schema of the tool.
    root: &'a Value,
    place: String,
    /// The prefix of its rules' names.
    rule: String,
}

impl GrammarWriter {
    /// A call in tags. Parameters follow the order of the schema, and optional ones may be missing.
    pub(crate) fn tagged_call(
        &mut self,
        tags: &'static CallTags,
        rule: &str,
        name: &str,
        schema: &Value,
    ) -> Result<String, ReplyGrammarError> {
        let error = |place: String, reason: String| ReplyGrammarError {
            origin: GrammarOrigin::Tool(name.to_owned()),
            error: GrammarError {
                place,
                ..GrammarError::at_root(reason)
            },
        };
        let object = resolved(schema, schema);
        let known = |key: &str| OBJECT_KEYWORDS.contains(&key) || is_annotation(key);
        if let Some(key) = unknown_keyword(object, known) {
            let reason = format!("{key} cannot be followed in the calls of this model");
            return Err(error(String::new(), reason));
        }
        let properties = object["properties"].as_object();
        let required = object["required"].as_array().into_iter().flatten();
        let required: Vec<_> = required.filter_map(Value::as_str).collect();
        let is_missing = |name: &&&str| !properties.is_some_and(|all| all.contains_key(**name));
        if let Some(missing) = required.iter().find(is_missing) {
            let reason = format!("{missing:?} is required and not one of the properties");
            return Err(error("required".to_owned(), reason));
        }
        let mut call = self.text(&tags.begin(name));
        for (index, (key, property)) in properties.into_iter().flatten().enumerate() {
            let place = format!("properties.{key}");
            let is_required = required.contains(&key.as_str());
            if key.contains(['<', '>', '"', '\n']) || key.trim() != key || key.is_empty() {
                if is_required {
                    let reason = "this model cannot write such a name in a call".to_owned();
                    return Err(error(place, reason));
                }
                continue;
            }
            let parameter = Parameter {
                tags,
                tool: name,
                root: schema,
                place,
                rule: format!("{rule}_{index}"),
            };
            let mut values = Vec::new();
            self.values(&parameter, property, &mut 0, &mut values)
                .map_err(|reason| error(parameter.place.clone(), reason))?;
            if values.is_empty() {
                let reason = "nothing can be its value".to_owned();
                return Err(error(parameter.place, reason));
            }
            self.rule(&parameter.rule, &values.join(" | "));
            let begin = self.text(&tags.begin_value(key));
            let gap = self.text(tags.gap);
            let optional = if is_required { "" } else { "?" };
            call += &format!(" ({begin} {} {gap}){optional}", parameter.rule);
        }
        Ok(call + " " + &self.text(&tags.end()))
    }

    /// Adds the values of a parameter, each with the end of its tag.
    fn values(
        &mut self,
        parameter: &Parameter,
        schema: &Value,
        num_schemas: &mut usize,
        values: &mut Vec<String>,
    ) -> Result<(), String> {
        *num_schemas += 1;
        if *num_schemas > MAX_SCHEMAS {
            return Err("it has too many alternatives".to_owned());
        }
        let schema = resolved(parameter.root, schema);
        let alternatives = ALTERNATIVES
            .iter()
            .find_map(|keyword| Some((*keyword, schema[*keyword].as_array()?)));
        if let Some((keyword, alternatives)) = alternatives {
            let known = |key: &str| key == keyword || is_annotation(key);
            if let Some(key) = unknown_keyword(schema, known) {
                return Err(format!("{key} beside alternatives cannot be followed"));
            }
            for alternative in alternatives {
                self.values(parameter, alternative, num_schemas, values)?;
            }
            return Ok(());
        }
        let (text, json) = split_by_text(schema);
        let origin = || GrammarOrigin::Tool(parameter.tool.to_owned());
        if let Some(text) = text {
            // Text never contains a special token. If the end tag is ordinary text, it belongs to the same terminal as
            // the value.
            let end = parameter.tags.end_value();
            let (inner, outer) = match self.is_special(parameter.tags.value[1]) {
                true => (String::new(), self.text(&end)),
                false => (end, String::new()),
            };
            let source = GrammarSource::Lark(text_grammar(&text, parameter.tags, &inner)?);
            let value = self.part(source, origin(), parameter.place.clone());
            values.push(format!("{value} {outer}"));
        }
        if let Some(json) = json {
            let source = GrammarSource::JsonSchema(with_definitions(json, parameter.root));
            let value = self.part(source, origin(), parameter.place.clone());
            values.push(format!(
                "{value} {}",
                self.text(&parameter.tags.end_value())
            ));
        }
        Ok(())
    }
}

/// A schema with the definitions of the whole one, so that its references stay valid.
pub(crate) fn with_definitions(mut schema: Value, root: &Value) -> Value {
    if let Value::Object(members) = &mut schema {
        for key in DEFINITIONS {
            if let Some(definitions) = root.get(key) {
                members.entry(key).or_insert(definitions.clone());
            }
        }
    }
    schema
}

pub(crate) fn is_annotation(key: &str) -> bool {
    ANNOTATIONS.contains(&key) || key == "definitions"
}

pub(crate) fn unknown_keyword(schema: &Value, known: impl Fn(&str) -> bool) -> Option<&str> {
    let mut keys = schema.as_object().into_iter().flatten().map(|(key, _)| key);
    keys.find(|key| !known(key)).map(String::as_str)
}

/// The target of references, and of `allOf` with one member.
pub(crate) fn resolved<'s>(root: &'s Value, mut schema: &'s Value) -> &'s Value {
    for _ in 0..MAX_REFERENCES {
        let reference = schema["$ref"]
            .as_str()
            .and_then(|path| path.strip_prefix('#'));
        let next = match (reference, schema["allOf"].as_array().map(Vec::as_slice)) {
            (Some(path), _) => root.pointer(path),
            (None, Some([only])) => Some(only),
            _ => None,
        };
        match next {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// The strings that a schema allows, and its other values. A schema without types is read as strings, as the parser of
/// the format reads it.
pub(crate) fn split_by_text(schema: &Value) -> (Option<Value>, Option<Value>) {
    let Some(members) = schema.as_object() else {
        return (Some(json!({"type": "string"})), None);
    };
    let with = |key: &str, value: Value| {
        let mut members = members.clone();
        members.insert(key.to_owned(), value);
        Value::Object(members)
    };
    let mut texts = members.clone();
    let choices = match (&schema["const"], &schema["enum"]) {
        (Value::Null, Value::Array(choices)) => Some(choices.clone()),
        (Value::Null, _) => None,
        (only, _) => Some(vec![only.clone()]),
    };
    if let Some(choices) = choices {
        let (strings, others): (Vec<_>, Vec<_>) = choices.into_iter().partition(Value::is_string);
        texts.insert("enum".to_owned(), strings.clone().into());
        let texts = (!strings.is_empty()).then_some(Value::Object(texts));
        let others = (!others.is_empty()).then(|| json!({"enum": others}));
        return (texts, others);
    }
    match &schema["type"] {
        Value::String(kind) if kind == "string" => (Some(schema.clone()), None),
        Value::Array(kinds) if kinds.iter().any(|kind| kind == "string") => {
            let others: Vec<_> = kinds.iter().filter(|kind| *kind != "string").collect();
            let others = (!others.is_empty()).then(|| with("type", json!(others)));
            (Some(Value::Object(texts)), others)
        }
        Value::Null => (Some(Value::Object(texts)), None),
        _ => (None, Some(schema.clone())),
    }
}

/// A string without quotes and the end of its tag. String and end are one terminal, so that the first occurrence of the
/// end ends the string.
fn text_grammar(schema: &Value, tags: &CallTags, end: &str) -> Result<String, String> {
    let known = |key: &str| STRING_KEYWORDS.contains(&key) || is_annotation(key);
    if let Some(key) = unknown_keyword(schema, known) {
        return Err(format!(
            "{key} cannot be followed in the calls of this model"
        ));
    }
    let end = Value::from(end);
    let [_, close] = tags.value;
    if let Some(choices) = schema["enum"].as_array() {
        let choices = choices.iter().filter_map(Value::as_str);
        let choices = choices.filter(|choice| !choice.contains(close));
        let choices: Vec<_> = choices
            .map(literal)
            .map(|choice| choice.unwrap_or_else(|| "\"\"".to_owned()))
            .collect();
        return Ok(format!("start: ({}) {end}", choices.join(" | ")));
    }
    let text = text_conditions(schema, close, 0)?;
    Ok(format!("start: VALUE\nVALUE: ({text}) {end}"))
}

/// The conditions of a string without quotes, as one terminal that does not contain `end`. It has at least `min_len`
/// characters.
pub(crate) fn text_conditions(schema: &Value, end: &str, min_len: u64) -> Result<String, String> {
    let bound = |key: &str| schema[key].as_u64();
    let min = bound("minLength").unwrap_or(0).max(min_len);
    let max = bound("maxLength").map_or(String::new(), |max| max.to_string());
    let end = end.replace('/', "\\/").replace('|', "\\|");
    let mut conditions = vec![
        format!("/(?s:.{{{min},{max}}})/"),
        format!("~/(?s:.*){end}(?s:.*)/"),
    ];
    if let Some(pattern) = schema["pattern"].as_str() {
        if let Some(reason) = nesting_error(pattern) {
            return Err(reason);
        }
        // An unanchored pattern matches anywhere in a string.
        let begins = pattern.strip_prefix('^');
        let inner = begins.unwrap_or(pattern);
        let ends = inner
            .strip_suffix('$')
            .filter(|inner| !inner.ends_with('\\'));
        let inner = regex_to_lark(ends.unwrap_or(inner), "dw");
        let anything = "(?s:.*)";
        let before = if begins.is_some() { "" } else { anything };
        let behind = if ends.is_some() { "" } else { anything };
        conditions.push(format!("/{before}({inner}){behind}/"));
    }
    Ok(conditions.join(" & "))
}
