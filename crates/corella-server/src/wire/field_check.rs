//! Refuses unknown fields, and known fields without support, instead of ignoring them.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use strsim::osa_distance;

use crate::wire::api_error::ApiError;
use crate::wire::field_table::sampling::STREAM_OPTIONS;
use crate::wire::field_table::{Endpoint, Field, FieldTable, Treatment};

/// Checks the fields of a request to one endpoint.
#[derive(Clone, Copy)]
pub struct FieldCheck {
    pub endpoint: Endpoint,
    pub allow_unknown_fields: bool,
    /// Whether `kv_transfer_params` are read.
    pub takes_kv_transfer: bool,
}

/// Visits the names of all fields; other structs read their values.
impl<'de> DeserializeSeed<'de> for FieldCheck {
    type Value = Result<(), ApiError>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldCheck {
    type Value = Result<(), ApiError>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut result = Ok(());
        let table = self.endpoint.table();
        while let Some(name) = fields.next_key::<String>()? {
            // Only the first fault is reported, but the rest must still be valid JSON.
            if result.is_err() {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            let known = table.find(&name);
            result = match known.map(|field| &field.treatment) {
                Some(_) if self.reads_kv_transfer() && name == KV_TRANSFER_PARAMS => {
                    fields.next_value::<IgnoredAny>()?;
                    Ok(())
                }
                Some(Treatment::Refused(_)) => {
                    let value = fields.next_value::<Value>()?;
                    self.check_value(table, &name, "", &value)
                }
                Some(Treatment::Read(_)) if name == "stream_options" => {
                    match fields.next_value::<Value>()? {
                        Value::Object(options) => self.check(&STREAM_OPTIONS, &name, &options),
                        // The code that reads the field checks the type.
                        _ => Ok(()),
                    }
                }
                _ => match fields.next_value::<Option<IgnoredAny>>()? {
                    Some(_) => self.accept(table, &name, ""),
                    None => Ok(()),
                },
            };
        }
        Ok(result)
    }
}

impl FieldCheck {
    /// Checks an object within a body; `path` is its place in the body.
    pub fn check(
        &self,
        table: &FieldTable,
        path: &str,
        fields: &Map<String, Value>,
    ) -> Result<(), ApiError> {
        let mut refusals = { fields.iter() }
            .filter_map(|(name, value)| self.check_value(table, name, path, value).err());
        match refusals.next() {
            None => Ok(()),
            Some(first) => Err(first.with_others(refusals.take(MAX_OTHER_REFUSALS))),
        }
    }

    /// A null member counts as absent. Client libraries send every member of their types.
    fn check_value(
        &self,
        table: &FieldTable,
        name: &str,
        path: &str,
        value: &Value,
    ) -> Result<(), ApiError> {
        match table.find(name) {
            _ if value.is_null() => Ok(()),
            Some(&Field {
                treatment: Treatment::Refused(is_neutral),
                about,
                ..
            }) => match is_neutral(value) {
                true => Ok(()),
                false => Err(ApiError::unsupported(joined(path, name), about)),
            },
            _ => self.accept(table, name, path),
        }
    }

    /// Returns whether `kv_transfer_params` are read. Answers of some APIs have no place for the field.
    fn reads_kv_transfer(&self) -> bool {
        let has_none = matches!(
            self.endpoint,
            Endpoint::Responses | Endpoint::Messages | Endpoint::CountTokens
        );
        self.takes_kv_transfer && !has_none
    }

    /// Accepts a field that is not refused, if it is known.
    fn accept(&self, table: &FieldTable, name: &str, path: &str) -> Result<(), ApiError> {
        if let Some(field) = table.find(name) {
            if let Treatment::NoEffect = field.treatment {
                let reason = field.about;
                tracing::debug!(name, path, reason, "field accepted without effect");
            }
            return Ok(());
        }
        if table.passes_over(name) {
            return Ok(());
        }
        if self.allow_unknown_fields {
            return Ok(());
        }
        let others = self.endpoint.others_with(name);
        Err(match path.is_empty() && !others.is_empty() {
            true => ApiError::misplaced(name, self.endpoint, &others),
            false => ApiError::unknown_field(path, name, closest_in(table, name)),
        })
    }
}

/// The path of a member.
fn joined(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    }
}

/// Returns the closest name that is accepted.
fn closest_in(table: &FieldTable, name: &str) -> Option<&'static str> {
    let accepted = table
        .fields()
        .filter(|field| !matches!(field.treatment, Treatment::Refused(_)))
        .map(|field| field.name);
    closest(name, accepted)
}

/// The only field that is read or refused depending on the server's start-up options.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// Limits the further refusals in a message.
const MAX_OTHER_REFUSALS: usize = 3;

/// Longer names are not compared, because they are not typing errors.
const MAX_NAME_BYTES: usize = 64;

/// Returns the closest known name, if about two of three letters match.
pub fn closest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let name = name.to_lowercase();
    let distances = names.map(|known| (osa_distance(&name, known), known));
    // Among equally close names the first wins, and fields that are read come first.
    let (num_edits, known) = distances.min_by_key(|&(num_edits, _)| num_edits)?;
    (num_edits <= name.chars().count().max(3) / 3).then_some(known)
}
