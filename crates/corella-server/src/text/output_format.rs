//! The fields for an answer's format: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's earlier
//! fields `guided_*`.

use corella_text::{GrammarError, GrammarSource};
use serde_json::{Map, Value, json};

use crate::wire::api_error::ApiError;
use crate::wire::field_check::closest;
use crate::wire::field_limit::MAX_GUIDED_CHOICES;

/// The fields as sent.
#[derive(Debug, Default)]
pub struct OutputFormatFields {
    pub response_format: Option<Value>,
    pub structured_outputs: Option<Value>,
    pub guided_json: Option<Value>,
    pub guided_json_object: Option<bool>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
}

/// The format of an answer, and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputFormat {
    pub source: GrammarSource,
    /// The path of the field in the body, for errors of the grammar.
    pub field: String,
}

impl OutputFormatFields {
    /// Checks everything but the grammar itself. Returns `None` if the format is free.
    pub fn checked(self) -> Result<Option<OutputFormat>, ApiError> {
        let mut formats = Vec::new();
        let mut add = |field: &str, source| {
            let field = field.to_owned();
            formats.push(OutputFormat { source, field });
        };
        if let Some(format) = self.guided_json {
            add("guided_json", json_schema("guided_json", format)?);
        }
        if self.guided_json_object == Some(true) {
            add("guided_json_object", GrammarSource::JsonObject);
        }
        if let Some(regex) = self.guided_regex {
            add("guided_regex", GrammarSource::Regex(regex));
        }
        if let Some(texts) = self.guided_choice {
            add("guided_choice", choice("guided_choice", texts)?);
        }
        if let Some(grammar) = self.guided_grammar {
            add("guided_grammar", GrammarSource::of_grammar(grammar));
        }
        formats.extend(structured_outputs(self.structured_outputs)?);
        let openai = typed_format("response_format", self.response_format, Some("json_schema"));
        formats.extend(openai?);
        match &formats[..] {
            [_, second, ..] => Err(ApiError::invalid(
                &second.field,
                format!("cannot be combined with {}", formats[0].field),
            )),
            _ => Ok(formats.pop()),
        }
    }
}

impl OutputFormat {
    /// Returns the error of an API call whose grammar does not compile.
    pub fn error(&self, error: &GrammarError) -> ApiError {
        let param = match error.place.is_empty() {
            true => self.field.clone(),
            false => format!("{}.{}", self.field, error.place),
        };
        ApiError::invalid(param, &error.reason)
    }
}

/// The member `format` of the Responses API's field `text`.
pub fn text_format(field: Option<Value>) -> Result<Option<OutputFormat>, ApiError> {
    typed_format("text.format", field, None)
}

/// Returns the format of an object with a `type`. The schema is in the object's member `member` or, with `None`, in the
/// object itself.
fn typed_format(
    path: &str,
    field: Option<Value>,
    member: Option<&str>,
) -> Result<Option<OutputFormat>, ApiError> {
    let Some(field) = field.filter(|field| !field.is_null()) else {
        return Ok(None);
    };
    let mut fields = object(path, field)?;
    let kind = fields.remove("type");
    let format = match (kind.as_ref().and_then(Value::as_str), member) {
        (Some("text"), _) => None,
        (Some("json_object"), _) => Some(OutputFormat {
            source: GrammarSource::JsonObject,
            field: path.to_owned(),
        }),
        (Some("json_schema"), None) => Some(schema_of(path, std::mem::take(&mut fields))?),
        (Some("json_schema"), Some(member)) => {
            let inner = fields.remove(member).unwrap_or(Value::Null);
            let path = format!("{path}.{member}");
            Some(schema_of(&path, object(&path, inner)?)?)
        }
        _ => {
            return Err(ApiError::invalid(
                format!("{path}.type"),
                "must be text, json_object or json_schema",
            ));
        }
    };
    no_others(path, &fields, &[])?;
    Ok(format)
}

/// The member `format` of the Messages API's field `output_config`.
pub fn message_format(field: Option<Value>) -> Result<Option<OutputFormat>, ApiError> {
    const FIELD: &str = "output_config.format";
    let Some(field) = field.filter(|field| !field.is_null()) else {
        return Ok(None);
    };
    let mut fields = object(FIELD, field)?;
    match fields.remove("type").as_ref().and_then(Value::as_str) {
        Some("json_schema") => schema_of(FIELD, fields).map(Some),
        _ => Err(ApiError::invalid(
            format!("{FIELD}.type"),
            "must be json_schema",
        )),
    }
}

/// Returns the format of an object with a schema. The members `name` and `description` serve the caller only, and every
/// schema is followed strictly.
fn schema_of(path: &str, mut fields: Map<String, Value>) -> Result<OutputFormat, ApiError> {
    let field = format!("{path}.schema");
    let schema = fields.remove("schema").filter(|schema| !schema.is_null());
    let schema = schema.ok_or_else(|| ApiError::invalid(&field, "is required"))?;
    // A boolean is a schema, too, but allows all texts or none, which no caller wants.
    if schema.is_boolean() {
        return Err(ApiError::invalid(field, "must be an object"));
    }
    no_others(path, &fields, &["name", "description", "strict"])?;
    Ok(OutputFormat {
        source: json_schema(&field, schema)?,
        field,
    })
}

/// The forms of vLLM's `structured_outputs`.
const KINDS: [&str; 5] = ["json", "json_object", "regex", "choice", "grammar"];

/// vLLM's switches, which change nothing: there is one backend, and members outside a schema are never generated.
const WITHOUT_EFFECT: [&str; 4] = [
    "_backend",
    "_backend_was_auto",
    "disable_fallback",
    "disable_additional_properties",
];

/// vLLM's switch for JSON without whitespace between its parts.
const COMPACT: &str = "disable_any_whitespace";

/// Reads vLLM's field.
fn structured_outputs(field: Option<Value>) -> Result<Option<OutputFormat>, ApiError> {
    const FIELD: &str = "structured_outputs";
    let Some(field) = field else {
        return Ok(None);
    };
    let mut fields = object(FIELD, field)?;
    fields.retain(|name, value| {
        !value.is_null() && *value != false && !WITHOUT_EFFECT.contains(&name.as_str())
    });
    let is_compact = match fields.remove(COMPACT) {
        None => false,
        Some(Value::Bool(is_compact)) => is_compact,
        Some(_) => {
            let field = format!("{FIELD}.{COMPACT}");
            return Err(ApiError::invalid(field, "must be true or false"));
        }
    };
    if let Some(other) = fields.keys().find(|name| !KINDS.contains(&name.as_str())) {
        return Err(match closest(other, KINDS.into_iter()) {
            meant @ Some(_) => ApiError::unknown_field(FIELD, other, meant),
            None => {
                let advice = format!("use one of {}", KINDS.join(", "));
                ApiError::unsupported(format!("{FIELD}.{other}"), &advice)
            }
        });
    }
    if fields.len() != 1 {
        let names: Vec<_> = fields.keys().map(String::as_str).collect();
        let kinds = KINDS.join(", ");
        let reason = match names.is_empty() {
            true => format!("must have one of {kinds}"),
            false => format!(
                "must have only one of {kinds}, and has {}",
                names.join(" and ")
            ),
        };
        return Err(ApiError::invalid(FIELD, reason));
    }
    let (kind, value) = fields.into_iter().next().expect("it has one field");
    let field = format!("{FIELD}.{kind}");
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        _ => Err(ApiError::invalid(&field, "must be a string")),
    };
    let source = match kind.as_str() {
        "json" if is_compact => compact(json_schema(&field, value)?),
        "json_object" if is_compact => compact(GrammarSource::JsonObject),
        "json" => json_schema(&field, value)?,
        "json_object" => GrammarSource::JsonObject,
        "regex" => GrammarSource::Regex(text(value)?),
        "choice" => {
            let texts = serde_json::from_value(value);
            let texts =
                texts.map_err(|_| ApiError::invalid(&field, "must be an array of strings"))?;
            choice(&field, texts)?
        }
        _ => GrammarSource::of_grammar(text(value)?),
    };
    Ok(Some(OutputFormat { source, field }))
}

/// Rules out whitespace between the parts of JSON, unless the schema has its own options for that.
fn compact(source: GrammarSource) -> GrammarSource {
    let mut schema = match source {
        GrammarSource::JsonObject => Map::from_iter([("type".to_owned(), "object".into())]),
        GrammarSource::JsonSchema(Value::Object(schema)) => schema,
        GrammarSource::JsonSchema(Value::Bool(true)) => Map::new(),
        source => return source,
    };
    schema
        .entry("x-guidance")
        .or_insert_with(|| json!({"whitespace_flexible": false}));
    GrammarSource::JsonSchema(Value::Object(schema))
}

/// Returns a schema, which may also be sent as text, as in vLLM.
pub fn json_schema(field: &str, schema: Value) -> Result<GrammarSource, ApiError> {
    let schema = match schema {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::invalid(field, format!("is not JSON: {error}")))?,
        schema => schema,
    };
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(GrammarSource::JsonSchema(schema)),
        _ => Err(ApiError::invalid(field, "must be a JSON schema")),
    }
}

fn choice(field: &str, texts: Vec<String>) -> Result<GrammarSource, ApiError> {
    let is_usual = !texts.is_empty() && texts.len() <= MAX_GUIDED_CHOICES;
    if !is_usual || texts.iter().any(String::is_empty) {
        return Err(ApiError::invalid(
            field,
            format!("must have between 1 and {MAX_GUIDED_CHOICES} texts, none of them empty"),
        ));
    }
    Ok(GrammarSource::Choice(texts))
}

fn object(field: &str, value: Value) -> Result<Map<String, Value>, ApiError> {
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(ApiError::invalid(field, "must be an object")),
    }
}

/// Refuses fields that are not read: they might change the answer.
fn no_others(field: &str, fields: &Map<String, Value>, known: &[&str]) -> Result<(), ApiError> {
    let is_other = |name: &&String| !known.contains(&name.as_str()) && !fields[*name].is_null();
    match fields.keys().find(is_other) {
        Some(name) => Err(ApiError::unknown_field(field, name, None)),
        None => Ok(()),
    }
}
