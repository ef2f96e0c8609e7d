//! The JSON schemas of the values that fields take.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::FieldTable;
use crate::wire::number_range::NumberRange;

/// The bounds and names that differ between servers.
pub struct Limits {
    pub model_names: Vec<String>,
    pub max_model_len: u32,
    pub max_token_id: usize,
    pub max_logprobs: u32,
    pub max_num_choices: u32,
    /// The number of dimensions of a whole vector.
    pub vector_len: usize,
    /// The names of prompts that the model's files define.
    pub prompt_names: Vec<String>,
    /// Whether the model's tokens see the whole text.
    pub is_encoder: bool,
}

/// A JSON schema.
pub struct Schema(Value);

impl Schema {
    /// Makes a schema of a form for which no function here exists.
    pub fn of(value: Value) -> Self {
        Self(value)
    }

    /// States the value of an absent field.
    pub fn or(self, default: impl Into<Value>) -> Self {
        self.with("default", default)
    }

    /// Bounds the number of items.
    pub fn sized(self, num_items: RangeInclusive<usize>) -> Self {
        self.with("minItems", *num_items.start())
            .with("maxItems", *num_items.end())
    }

    /// Explains the value.
    pub fn about(self, sentence: &str) -> Self {
        self.with("description", sentence)
    }

    /// Permits `null`, too, which counts as absent.
    pub fn or_null(mut self) -> Self {
        let schema = &mut self.0;
        if let Some(kind) = schema.get_mut("type") {
            let mut kinds = match kind.take() {
                Value::Array(kinds) => kinds,
                kind => vec![kind],
            };
            kinds.push("null".into());
            *kind = kinds.into();
        } else if let Some(Value::Array(values)) = schema.get_mut("enum") {
            values.push(Value::Null);
        } else if let Some(Value::Array(choices)) = schema.get_mut("anyOf") {
            choices.push(json!({"type": "null"}));
        } else if schema.get("$ref").is_some() {
            *schema = json!({"anyOf": [schema.take(), {"type": "null"}]});
        }
        self
    }

    pub fn into_json(self) -> Value {
        self.0
    }

    fn with(mut self, keyword: &str, value: impl Into<Value>) -> Self {
        self.0[keyword] = value.into();
        self
    }
}

pub fn anything(_: &Limits) -> Schema {
    Schema(json!({}))
}

pub fn boolean(_: &Limits) -> Schema {
    Schema(json!({"type": "boolean"}))
}

/// A switch that is off unless it is set.
pub fn off(limits: &Limits) -> Schema {
    boolean(limits).or(false)
}

/// A switch that is on unless it is set.
pub fn on(limits: &Limits) -> Schema {
    boolean(limits).or(true)
}

pub fn text(_: &Limits) -> Schema {
    Schema(json!({"type": "string"}))
}

/// An object whose members other code checks.
pub fn any_object(_: &Limits) -> Schema {
    Schema(json!({"type": "object"}))
}

/// A count of at least 1.
pub fn count(_: &Limits) -> Schema {
    integer(1..=u32::MAX.into())
}

pub fn any_integer(_: &Limits) -> Schema {
    integer(i64::MIN..=i64::MAX)
}

/// A number of alternatives to a token.
pub fn num_logprobs(limits: &Limits) -> Schema {
    integer(0..=limits.max_logprobs.into())
}

pub fn num_choices(limits: &Limits) -> Schema {
    integer(1..=limits.max_num_choices.into())
}

pub fn text_of(num_bytes: RangeInclusive<usize>) -> Schema {
    text_type()
        .with("minLength", *num_bytes.start())
        .with("maxLength", *num_bytes.end())
}

pub fn integer(range: RangeInclusive<i64>) -> Schema {
    Schema(json!({"type": "integer", "minimum": range.start(), "maximum": range.end()}))
}

pub fn number(range: NumberRange) -> Schema {
    let mut schema = range.keywords();
    schema["type"] = "number".into();
    Schema(schema)
}

pub fn token(limits: &Limits) -> Schema {
    integer(0..=limits.max_token_id as i64)
}

/// The tokens of a prompt.
pub fn tokens(limits: &Limits) -> Schema {
    list(token(limits)).sized(1..=limits.max_model_len as usize)
}

/// A prompt as text or tokens, or up to `max_num` prompts.
pub fn prompts(limits: &Limits, max_num: usize) -> Schema {
    let prompt = either([text_type(), tokens(limits)]);
    either([text_type(), tokens(limits), list(prompt).sized(1..=max_num)])
}

pub fn list(items: Schema) -> Schema {
    Schema(json!({"type": "array", "items": items.0}))
}

/// One of a few fixed values.
pub fn one_of<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Schema {
    let values: Vec<Value> = values.into_iter().map(Into::into).collect();
    Schema(json!({"enum": values}))
}

pub fn constant(value: &str) -> Schema {
    Schema(json!({"const": value}))
}

pub fn either(choices: impl IntoIterator<Item = Schema>) -> Schema {
    let choices: Vec<Value> = choices.into_iter().map(Schema::into_json).collect();
    Schema(json!({"anyOf": choices}))
}

/// An object of another table.
pub fn object(table: &FieldTable) -> Schema {
    let place = format!("#/components/schemas/{}", table.name);
    Schema(json!({"$ref": place}))
}

/// A text, or a list of parts, whose table is `part`.
pub fn text_or(part: &FieldTable) -> Schema {
    either([text_type(), list(object(part))])
}

fn text_type() -> Schema {
    Schema(json!({"type": "string"}))
}
