//! Gemma 4's calls as grammars. Keys have no quotes, and the quotes of strings are a token of their own, so that a
//! schema is followed value by value. Values that this notation cannot follow are JSON, which the parser of the format
//! reads, too.

use serde_json::{Value, json};

use super::call_grammar::arguments_schema;
use super::gemma4_arguments::QUOTE;
use super::member_grammar::{Members, alternatives, refers_to_definitions};
use super::reply_grammar::{GrammarOrigin, GrammarWriter, literal};
use super::tagged_grammar::{
    MAX_SCHEMAS, STRING_KEYWORDS, is_annotation, resolved, split_by_text, text_conditions,
    unknown_keyword, with_definitions,
};
use crate::grammar::grammar_source::GrammarSource;

/// The deepest nesting of values in this notation.
const MAX_DEPTH: usize = 8;
/// The most items of a bounded array in this notation.
const MAX_ITEMS: u64 = 64;
const ANY: &str = "gemma4_any";

/// The tool whose arguments are written.
struct Arguments<'a> {
    tool: &'a str,
    /// The whole schema of the tool.
    root: &'a Value,
    num_schemas: usize,
}

/// A value among the arguments.
#[derive(Clone)]
struct SchemaPath {
    /// The path of the value's schema.
    path: String,
    /// The prefix of the names of the value's rules.
    rule: String,
    depth: usize,
}

impl SchemaPath {
    fn within(&self, path: &str, index: usize) -> Self {
        let path = match &*self.path {
            "" => path.to_owned(),
            outer => format!("{outer}.{path}"),
        };
        Self {
            path,
            rule: format!("{}_{index}", self.rule),
            depth: self.depth + 1,
        }
    }
}

impl GrammarWriter {
    /// A call.
    pub(crate) fn gemma4_call(&mut self, rule: &str, name: &str, schema: &Value) -> String {
        let root = &arguments_schema(schema);
        let mut arguments = Arguments {
            tool: name,
            root,
            num_schemas: 0,
        };
        let at = SchemaPath {
            path: String::new(),
            rule: rule.to_owned(),
            depth: 0,
        };
        let object = match refers_to_definitions(root) {
            true => self.gemma4_object(&mut arguments, &at, resolved(root, root)),
            false => None,
        };
        let object = object.unwrap_or_else(|| self.gemma4_json(&arguments, &at, root));
        let [begin, end] = [
            format!("<|tool_call>call:{name}"),
            "<tool_call|>".to_owned(),
        ];
        format!("{} {object} {}", self.text(&begin), self.text(&end))
    }

    fn gemma4_value(
        &mut self,
        arguments: &mut Arguments,
        at: &SchemaPath,
        schema: &Value,
    ) -> String {
        arguments.num_schemas += 1;
        let value = match arguments.num_schemas <= MAX_SCHEMAS && at.depth <= MAX_DEPTH {
            true => self.gemma4_followed(arguments, at, schema),
            false => None,
        };
        value.unwrap_or_else(|| self.gemma4_json(arguments, at, schema))
    }

    /// A value in JSON.
    fn gemma4_json(&mut self, arguments: &Arguments, at: &SchemaPath, schema: &Value) -> String {
        let source = GrammarSource::JsonSchema(with_definitions(schema.clone(), arguments.root));
        let origin = GrammarOrigin::Tool(arguments.tool.to_owned());
        self.part(source, origin, at.path.clone())
    }

    /// A value in the model's own notation; `None` if the schema cannot be followed in that notation.
    fn gemma4_followed(
        &mut self,
        arguments: &mut Arguments,
        at: &SchemaPath,
        schema: &Value,
    ) -> Option<String> {
        let root = arguments.root;
        if let Some(alternatives) = alternatives(root, schema) {
            let values: Vec<_> = alternatives
                .iter()
                .enumerate()
                .map(|(index, schema)| {
                    let at = SchemaPath {
                        path: at.path.clone(),
                        ..at.within("", index)
                    };
                    self.gemma4_value(arguments, &at, schema)
                })
                .collect();
            return Some(format!("({})", values.join(" | ")));
        }
        let schema = resolved(root, schema);
        let says_nothing = unknown_keyword(schema, is_annotation).is_none();
        if says_nothing && !schema.is_boolean() {
            return Some(self.gemma4_any());
        }
        let says_values = ["type", "enum", "const"]
            .iter()
            .any(|key| schema.get(key).is_some());
        if !says_values {
            return None;
        }
        let (text, other) = split_by_text(schema);
        let mut values = Vec::new();
        if let Some(text) = text {
            values.push(self.gemma4_text(arguments, at, &text)?);
        }
        if let Some(other) = other {
            let value = match other["type"].as_str() {
                Some("object") => self.gemma4_object(arguments, at, &other),
                Some("array") => self.gemma4_array(arguments, at, &other),
                _ => None,
            };
            values.push(value.unwrap_or_else(|| self.gemma4_json(arguments, at, &other)));
        }
        Some(format!("({})", values.join(" | ")))
    }

    /// A string between its quotes.
    fn gemma4_text(
        &mut self,
        arguments: &Arguments,
        at: &SchemaPath,
        schema: &Value,
    ) -> Option<String> {
        let known = |key: &str| STRING_KEYWORDS.contains(&key) || is_annotation(key);
        if unknown_keyword(schema, known).is_some() {
            return None;
        }
        let quote = self.text(QUOTE);
        if let Some(choices) = schema["enum"].as_array() {
            let choices = choices.iter().filter_map(Value::as_str);
            let choices = choices.filter(|choice| !choice.contains(QUOTE));
            let choices: Vec<_> = choices
                .map(|choice| literal(choice).unwrap_or_else(|| "\"\"".to_owned()))
                .collect();
            return (!choices.is_empty())
                .then(|| format!("{quote} ({}) {quote}", choices.join(" | ")));
        }
        if schema["maxLength"] == 0 {
            return Some(format!("{quote} {quote}"));
        }
        let is_special = self.is_special(QUOTE);
        // An end that is ordinary text belongs to the terminal, so that its first occurrence ends the string.
        let (min_len, end) = match is_special {
            true => (1, String::new()),
            false => (0, Value::from(QUOTE).to_string()),
        };
        let text = text_conditions(schema, QUOTE, min_len).ok()?;
        let source = GrammarSource::Lark(format!("start: VALUE\nVALUE: ({text}) {end}"));
        let origin = GrammarOrigin::Tool(arguments.tool.to_owned());
        let value = self.part(source, origin, at.path.clone());
        let may_be_empty =
            schema["minLength"].as_u64().unwrap_or(0) == 0 && schema["pattern"].as_str().is_none();
        Some(match (is_special, may_be_empty) {
            (true, true) => format!("{quote} {value}? {quote}"),
            (true, false) => format!("{quote} {value} {quote}"),
            (false, _) => format!("{quote} {value}"),
        })
    }

    fn gemma4_object(
        &mut self,
        arguments: &mut Arguments,
        at: &SchemaPath,
        schema: &Value,
    ) -> Option<String> {
        let known =
            |key: &str| matches!(key, "type" | "additionalProperties") || is_annotation(key);
        let is_free = at.depth > 0 && !schema["additionalProperties"].is_object();
        if is_free && unknown_keyword(schema, known).is_none() {
            self.gemma4_any();
            return Some(format!("{ANY}_object"));
        }
        let members = Members::of(schema, is_key)?;
        let mut written = Vec::new();
        // The template declares parameters and writes earlier calls in the order of their names.
        let mut sorted: Vec<_> = members.iter().collect();
        sorted.sort_by_key(|(key, _)| key.to_lowercase());
        for (index, (key, property)) in sorted.into_iter().enumerate() {
            let at = at.within(&format!("properties.{key}"), index);
            let value = self.gemma4_value(arguments, &at, property);
            let member = format!("{} {value}", self.text(&format!("{key}:")));
            written.push((member, members.is_required(key)));
        }
        let members = self.members(&at.rule, &written, ",");
        Some(format!("\"{{\" {members} \"}}\""))
    }

    fn gemma4_array(
        &mut self,
        arguments: &mut Arguments,
        at: &SchemaPath,
        schema: &Value,
    ) -> Option<String> {
        let known = |key: &str| {
            matches!(key, "type" | "items" | "minItems" | "maxItems") || is_annotation(key)
        };
        if unknown_keyword(schema, known).is_some() {
            return None;
        }
        let bound = |key: &str| schema[key].as_u64();
        let (min, max) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        if min.max(max.unwrap_or(0)) > MAX_ITEMS || max.is_some_and(|max| max < min) {
            return None;
        }
        let item = match schema.get("items") {
            Some(items) => self.gemma4_value(arguments, &at.within("items", 0), items),
            None => self.gemma4_any(),
        };
        let rule = format!("{}_item", at.rule);
        self.rule(&rule, &item);
        let more = format!("(\",\" {rule})");
        let more = match max {
            Some(0) => return Some("\"[]\"".to_owned()),
            Some(1) => String::new(),
            Some(max) => format!("{more}{{{},{}}}", min.saturating_sub(1), max - 1),
            None => format!("{more}{{{},}}", min.saturating_sub(1)),
        };
        let optional = if min == 0 { "?" } else { "" };
        Some(format!("\"[\" ({rule} {more}){optional} \"]\""))
    }

    /// Any value. Its rules are written only once.
    fn gemma4_any(&mut self) -> String {
        if self.writes_once(ANY) {
            let at = SchemaPath {
                path: String::new(),
                rule: ANY.to_owned(),
                depth: 0,
            };
            let arguments = Arguments {
                tool: "",
                root: &Value::Null,
                num_schemas: 0,
            };
            let text = json!({"type": "string"});
            let text = self.gemma4_text(&arguments, &at, &text).unwrap_or_default();
            let other = json!({"type": ["number", "boolean", "null"]});
            let other = self.gemma4_json(&arguments, &at, &other);
            self.rule(
                ANY,
                &format!("{ANY}_object | {ANY}_array | {text} | {other}"),
            );
            let key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";
            self.rule(&format!("{ANY}_pair"), &format!("{key} \":\" {ANY}"));
            for (name, item, [begin, end]) in [
                ("object", format!("{ANY}_pair"), ["{", "}"]),
                ("array", ANY.to_owned(), ["[", "]"]),
            ] {
                let items = format!("\"{begin}\" ({item} (\",\" {item})*)? \"{end}\"");
                self.rule(&format!("{ANY}_{name}"), &items);
            }
        }
        ANY.to_owned()
    }
}

/// Whether a key can be written without quotes.
fn is_key(key: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '$' | '@');
    !key.is_empty() && key.chars().all(is_part)
}
