//! Calls of tools as grammars, in each format: the markup verbatim, and arguments by the schema.

use serde_json::{Map, Value, json};

use super::glm4_reader::TURN;
use super::reply_grammar::{GrammarOrigin, GrammarWriter, ReplyGrammarError, WantedCalls};
use super::{CallFormat, ReplyContext};
use crate::GrammarError;
use crate::grammar::grammar_source::GrammarSource;

impl GrammarWriter {
    /// The calls of a reply: one, or several where the format and the request allow it.
    pub(crate) fn calls(
        &mut self,
        context: &ReplyContext,
        wanted: &WantedCalls,
    ) -> Result<String, ReplyGrammarError> {
        let (Some(format), Some(tools)) = (context.format.calls, context.tools.as_deref()) else {
            return Err(ReplyGrammarError {
                origin: GrammarOrigin::Whole,
                error: GrammarError::at_root("calls have no known format here".to_owned()),
            });
        };
        let mut calls = Vec::new();
        for (name, schema) in tools.iter() {
            if matches!(wanted, WantedCalls::One(wanted) if wanted != name) {
                continue;
            }
            let rule = format!("call{}", calls.len());
            let call = self.call(format, &rule, name, schema)?;
            self.rule(&rule, &call);
            calls.push(rule);
        }
        self.rule("call", &calls.join(" | "));
        let is_one = context.one_call || matches!(wanted, WantedCalls::One(_));
        let (begin, separator, end) = self.around_calls(format);
        let more = match (is_one, separator) {
            (false, Some(separator)) => format!("({separator} call)*"),
            _ => String::new(),
        };
        Ok(format!("{begin} call {more} {end}"))
    }

    /// The text before all calls, between two, and after all. Without a separator only one call is allowed.
    fn around_calls(&self, format: CallFormat) -> (String, Option<String>, String) {
        let (begin, separator, end) = match format {
            CallFormat::Tagged(format) => {
                let [begin, separator, end] =
                    format.tags().around_calls().map(|text| self.text(&text));
                return (begin, Some(separator), end);
            }
            CallFormat::Hermes => ("", Some("\n"), ""),
            CallFormat::Llama3 => ("", Some("; "), ""),
            CallFormat::Mistral if self.has_args_token => ("", Some(""), ""),
            CallFormat::Mistral => {
                // Tokenizers of SentencePiece put a space after a marker.
                let begin = format!("{} \" \"? \"[\"", self.text("[TOOL_CALLS]"));
                return (begin, Some(self.text(", ")), self.text("]"));
            }
            CallFormat::Granite => ("<|tool_call|>[", Some(", "), "]"),
            // A token after a call ends the reply, so there is only one call.
            CallFormat::Harmony => ("", None, ""),
            CallFormat::DeepSeekV3 => {
                ("<｜tool▁calls▁begin｜>", Some("\n"), "<｜tool▁calls▁end｜>")
            }
            CallFormat::DeepSeekV31 => ("<｜tool▁calls▁begin｜>", Some(""), "<｜tool▁calls▁end｜>"),
            CallFormat::Gemma4 => ("", Some(""), ""),
            CallFormat::Lfm2 => ("<|tool_call_start|>[", Some(", "), "]<|tool_call_end|>"),
            CallFormat::Olmo3 => ("<function_calls>", Some("\n"), "</function_calls>"),
            CallFormat::CommandR => ("Action: ```json\n[", Some(", "), "]\n```"),
            CallFormat::Glm4 => ("", Some(TURN), ""),
        };
        let separator = separator.map(|separator| self.text(separator));
        (self.text(begin), separator, self.text(end))
    }

    /// A call of the tool `name`. `rule` is the prefix of its rules' names.
    fn call(
        &mut self,
        format: CallFormat,
        rule: &str,
        name: &str,
        schema: &Value,
    ) -> Result<String, ReplyGrammarError> {
        if !may_be_object(schema) {
            let reason = "the arguments of a call are an object".to_owned();
            return Err(ReplyGrammarError {
                origin: GrammarOrigin::Tool(name.to_owned()),
                error: GrammarError {
                    place: "type".to_owned(),
                    ..GrammarError::at_root(reason)
                },
            });
        }
        let quoted = Value::from(name);
        let (begin, end) = match format {
            CallFormat::Tagged(format) => {
                return self.tagged_call(format.tags(), rule, name, schema);
            }
            CallFormat::Gemma4 => return Ok(self.gemma4_call(rule, name, schema)),
            CallFormat::Lfm2 | CallFormat::Olmo3 => match self.python_call(rule, name, schema) {
                Some(call) => return Ok(call),
                None => (format!("{{\"name\": {quoted}, \"arguments\": "), "}"),
            },
            CallFormat::Hermes => (
                format!("<tool_call>\n{{\"name\": {quoted}, \"arguments\": "),
                "}\n</tool_call>",
            ),
            CallFormat::Llama3 => (format!("{{\"name\": {quoted}, \"parameters\": "), "}"),
            CallFormat::Mistral if self.has_args_token => (format!("[TOOL_CALLS]{name}[ARGS]"), ""),
            CallFormat::Mistral | CallFormat::Granite => {
                (format!("{{\"name\": {quoted}, \"arguments\": "), "}")
            }
            CallFormat::CommandR => (format!("{{\"tool_name\": {quoted}, \"parameters\": "), "}"),
            CallFormat::Glm4 => (format!("{name}\n"), ""),
            CallFormat::Harmony => (
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
                "",
            ),
            CallFormat::DeepSeekV3 => (
                format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                "\n```<｜tool▁call▁end｜>",
            ),
            CallFormat::DeepSeekV31 => (
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
                "<｜tool▁call▁end｜>",
            ),
        };
        let arguments = GrammarSource::JsonSchema(arguments_schema(schema));
        let origin = GrammarOrigin::Tool(name.to_owned());
        let arguments = self.part(arguments, origin, String::new());
        // Some of Mistral's models write an id after the name.
        let begin = match begin.strip_suffix("[ARGS]") {
            Some(name) if self.has_call_id => format!(
                "{} ({} /[a-zA-Z0-9]{{9}}/)? {}",
                self.text(name),
                self.text("[CALL_ID]"),
                self.text("[ARGS]"),
            ),
            _ => self.text(&begin),
        };
        Ok(format!("{begin} {arguments} {}", self.text(end)))
    }
}

fn may_be_object(schema: &Value) -> bool {
    match &schema["type"] {
        Value::String(kind) => kind == "object",
        Value::Array(kinds) => kinds.iter().any(|kind| kind == "object"),
        _ => true,
    }
}

/// The schema of a call's arguments, which are an object. A tool without a schema has no parameters. If a schema lists
/// properties and says nothing of additional ones, a call has no additional ones.
pub(crate) fn arguments_schema(schema: &Value) -> Value {
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        _ => Map::from_iter([("properties".to_owned(), json!({}))]),
    };
    members.insert("type".to_owned(), "object".into());
    if let Some(Value::Object(properties)) = members.get("properties") {
        const SPEAKS_OF_OTHERS: [&str; 6] = [
            "additionalProperties",
            "patternProperties",
            "allOf",
            "anyOf",
            "oneOf",
            "$ref",
        ];
        let required = members.get("required").and_then(Value::as_array);
        let mut required = required.into_iter().flatten().filter_map(Value::as_str);
        let is_complete = required.all(|name| properties.contains_key(name));
        if is_complete
            && !SPEAKS_OF_OTHERS
                .iter()
                .any(|key| members.contains_key(*key))
        {
            members.insert("additionalProperties".to_owned(), false.into());
        }
    }
    Value::Object(members)
}
