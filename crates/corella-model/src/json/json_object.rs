//! Typed access to the fields of a JSON file, with errors that name the field and its value.

use corella_core::TokenId;
use serde_json::{Map, Value};

use crate::CheckpointError;

/// The fields of an object. `null` counts as absent: Transformers writes it for "not set".
pub struct JsonObject<'a> {
    file: &'a str,
    /// The path of this object in the file, with a dot at its end; empty for the file itself.
    prefix: String,
    fields: &'a Map<String, Value>,
}

/// Parses a file whose content is an object.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(CheckpointError::new(file, "is JSON but not an object")),
        Err(error) => Err(CheckpointError::new(
            file,
            format!("is not valid JSON: {error}"),
        )),
    }
}

impl<'a> JsonObject<'a> {
    pub fn new(file: &'a str, fields: &'a Map<String, Value>) -> Self {
        Self {
            file,
            prefix: String::new(),
            fields,
        }
    }

    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.fields.keys().map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// A field that must be a positive whole number.
    pub fn size(&self, field: &str) -> Result<usize, CheckpointError> {
        self.try_size(field)?.ok_or_else(|| self.missing(field))
    }

    pub fn try_size(&self, field: &str) -> Result<Option<usize>, CheckpointError> {
        self.typed(field, "must be a positive whole number", |value| {
            let size = usize::try_from(value.as_u64()?).ok()?;
            // Products of a few sizes must not overflow.
            (1..=1 << 31).contains(&size).then_some(size)
        })
    }

    pub fn number(&self, field: &str) -> Result<f64, CheckpointError> {
        self.try_number(field)?.ok_or_else(|| self.missing(field))
    }

    pub fn try_number(&self, field: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(field, "must be a number", Value::as_f64)
    }

    /// A field that is a list of numbers.
    pub fn try_numbers(&self, field: &str) -> Result<Option<Vec<f64>>, CheckpointError> {
        self.typed(field, "must be a list of numbers", |value| {
            value.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    /// Whether a field is present and `null`, for the few fields where that differs from absent.
    pub fn is_null(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(Value::is_null)
    }

    pub fn flag(&self, field: &str) -> Result<bool, CheckpointError> {
        Ok(self
            .typed(field, "must be true or false", Value::as_bool)?
            .unwrap_or(false))
    }

    pub fn try_text(&self, field: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(field, "must be a string", Value::as_str)
    }

    pub fn try_object(&self, field: &str) -> Result<Option<JsonObject<'a>>, CheckpointError> {
        let fields = self.typed(field, "must be an object", Value::as_object)?;
        Ok(fields.map(|fields| JsonObject {
            file: self.file,
            prefix: format!("{}{field}.", self.prefix),
            fields,
        }))
    }

    /// The fields of this object, overridden by those of another.
    pub fn fields_with(&self, other: &JsonObject<'_>) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.extend(other.fields.clone());
        fields
    }

    /// This object with other fields.
    pub fn with_fields<'b>(&'b self, fields: &'b Map<String, Value>) -> JsonObject<'b> {
        JsonObject {
            file: self.file,
            prefix: self.prefix.clone(),
            fields,
        }
    }

    /// The token ids in a field, which is one id or a list of ids; empty if absent.
    pub fn token_ids(&self, field: &str) -> Result<Vec<TokenId>, CheckpointError> {
        let id = |value: &Value| TokenId::try_from(value.as_u64()?).ok();
        let ids = self.typed(
            field,
            "must be a token id or a list of them",
            |value| match value {
                Value::Array(ids) => ids.iter().map(id).collect(),
                single => Some(vec![id(single)?]),
            },
        )?;
        Ok(ids.unwrap_or_default())
    }

    /// Converts a field; `must` describes the valid values for the error message.
    fn typed<T>(
        &self,
        field: &str,
        must: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        convert(value)
            .map(Some)
            .ok_or_else(|| self.refuse(field, must))
    }

    pub fn missing(&self, field: &str) -> CheckpointError {
        CheckpointError::new(self.file, format!("{}{field} is missing", self.prefix))
    }

    pub fn refuse(&self, field: &str, why: &str) -> CheckpointError {
        let value = self.fields.get(field).unwrap_or(&Value::Null).to_string();
        let shown: String = value.chars().take(60).collect();
        let dots = if shown.len() < value.len() { "…" } else { "" };
        CheckpointError::new(
            self.file,
            format!("{}{field} is {shown}{dots}; {why}", self.prefix),
        )
    }
}
