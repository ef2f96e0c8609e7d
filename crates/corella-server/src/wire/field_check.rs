//! Refuses unknown fields, and known fields without support, instead of ignoring them.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use strsim::osa_distance;

use crate::wire::api_error::ApiError;
use crate::wire::field_table::{Endpoint, FieldTable, STREAM_OPTIONS, Treatment};

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
            result = match table.find(&name) {
                Some(_) if self.reads_kv_transfer() && name == KV_TRANSFER_PARAMS => {
                    fields.next_value::<IgnoredAny>()?;
                    Ok(())
                }
                Some(Treatment::Refused(refused)) => {
                    let value = fields.next_value::<Value>()?;
                    let is_neutral = value.is_null() || (refused.is_neutral)(&value);
                    refuse_unless(is_neutral, || ApiError::unsupported(&*name, refused.advice))
                }
                Some(Treatment::ReadAt(endpoints)) if !self.may_have(endpoints) => {
                    let value = fields.next_value::<Option<IgnoredAny>>()?;
                    refuse_unless(value.is_none(), || {
                        ApiError::misplaced(&name, self.endpoint, endpoints)
                    })
                }
                Some(_) if name == "stream_options" => match fields.next_value::<Value>()? {
                    Value::Object(options) => self.check(&STREAM_OPTIONS, &name, &options),
                    // The field's reader checks its type.
                    _ => Ok(()),
                },
                treatment => match fields.next_value::<Option<IgnoredAny>>()? {
                    Some(_) => self.accept(table, &name, "", treatment),
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
        // A null member counts as absent. Client libraries send every member of their types.
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            match table.find(name) {
                Some(Treatment::Refused(refused)) => {
                    refuse_unless((refused.is_neutral)(value), || {
                        ApiError::unsupported(format!("{path}.{name}"), refused.advice)
                    })?;
                }
                treatment => self.accept(table, name, path, treatment)?,
            }
        }
        Ok(())
    }

    /// Answers of the other APIs have no place for the field.
    fn reads_kv_transfer(&self) -> bool {
        let has_none = matches!(
            self.endpoint,
            Endpoint::Responses | Endpoint::Messages | Endpoint::CountTokens
        );
        self.takes_kv_transfer && !has_none
    }

    fn accept(
        &self,
        table: &FieldTable,
        name: &str,
        path: &str,
        treatment: Option<Treatment>,
    ) -> Result<(), ApiError> {
        match treatment {
            Some(Treatment::NoEffect(reason)) => {
                tracing::debug!(name, path, reason, "field accepted without effect");
                Ok(())
            }
            None if !self.allow_unknown_fields => Err(ApiError::unknown_field(
                path,
                name,
                self.closest(name, table),
            )),
            _ => Ok(()),
        }
    }

    /// Returns the closest name that this endpoint accepts.
    fn closest(&self, name: &str, table: &FieldTable) -> Option<&'static str> {
        let names = table.names().filter(|known| match table.find(known) {
            Some(Treatment::Refused(_)) => false,
            Some(Treatment::ReadAt(endpoints)) => self.may_have(endpoints),
            _ => true,
        });
        closest(name, names)
    }

    /// `/tokenize` and `/apply-template` accept the fields of the generating endpoints, so that a request can be sent
    /// there unchanged to see its prompt.
    fn may_have(&self, endpoints: &[Endpoint]) -> bool {
        let reads_chat = self.endpoint.takes_a_chat() && endpoints.contains(&Endpoint::Chat);
        reads_chat || endpoints.contains(&self.endpoint)
    }
}

fn refuse_unless(is_neutral: bool, error: impl FnOnce() -> ApiError) -> Result<(), ApiError> {
    match is_neutral {
        true => Ok(()),
        false => Err(error()),
    }
}

/// The one field that some servers read and others refuse.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// Longer names are not compared, because they are not typing errors.
const MAX_NAME_BYTES: usize = 64;

/// Returns the closest known name, if about two of three letters match.
pub fn closest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let name = name.to_lowercase();
    let distances = names.map(|known| (osa_distance(&name, known), known));
    // Among equally close names the first wins, and readable names come first.
    let (num_edits, known) = distances.min_by_key(|&(num_edits, _)| num_edits)?;
    (num_edits <= name.chars().count().max(3) / 3).then_some(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::field_table::{
        BODY, CONTENT_PART, MESSAGE, TOKENIZE, llama_server, messages, ollama, pooling, responses,
    };

    #[test]
    fn every_name_is_in_a_table_once() {
        let tables = [
            &BODY,
            &TOKENIZE,
            &STREAM_OPTIONS,
            &MESSAGE,
            &CONTENT_PART,
            &messages::BODY,
            &messages::MESSAGE,
            &messages::BLOCK,
            &messages::THINKING,
            &messages::THINKING_BLOCK,
            &messages::TOOL_USE,
            &messages::TOOL_RESULT,
            &messages::TOOL,
            &messages::TOOL_CHOICE,
            &responses::BODY,
            &responses::TEXT,
            &responses::REASONING,
            &responses::MESSAGE,
            &responses::CONTENT,
            &responses::TOOL,
            &responses::CALL,
            &responses::CALL_OUTPUT,
            &responses::THOUGHT,
            &responses::REFERENCE,
            &pooling::EMBEDDINGS,
            &pooling::POOLING,
            &llama_server::COMPLETION,
            &llama_server::INFILL,
            &llama_server::EMBEDDING,
            &pooling::SCORE,
            &pooling::RERANK,
            &ollama::CHAT,
            &ollama::GENERATE,
            &ollama::SHOW,
            &ollama::PULL,
            &ollama::OPTIONS,
            &ollama::MESSAGE,
            &ollama::CALL,
            &ollama::CALLED_FUNCTION,
        ];
        for table in tables {
            let mut names: Vec<_> = table.names().collect();
            names.sort_unstable();
            let num_names = names.len();
            names.dedup();
            assert_eq!(names.len(), num_names);
        }
    }
}
