//! Every request field that this server knows by name: the fields of OpenAI's API and the additions of vLLM, SGLang,
//! llama.cpp, Ollama, TGI and the usual clients.
//!
//! A field is declared once, as a row. From its row come the check of requests, `/openapi.json` and the book's page of
//! fields. The structs that read bodies repeat only the field's name and type.
//!
//! Ignoring a field may give a wrong answer that looks right. So every field is either read, or accepted because it
//! cannot change the answer, or refused by name.

pub mod batch;
pub mod chat;
mod endpoint;
pub(crate) mod llama_server;
pub mod messages;
pub mod ollama;
pub mod pooling;
mod refused;
pub mod responses;
pub mod sampling;
mod schema;
#[cfg(test)]
mod tests;
pub mod token_generate;
mod without_effect;

pub use endpoint::Endpoint;
pub use schema::Limits;

use std::ptr;

use serde_json::{Map, Value, json};

use schema::Schema;

/// The tables of objects within bodies.
pub static OBJECTS: [&FieldTable; 33] = [
    &sampling::STREAM_OPTIONS,
    &token_generate::SAMPLING_PARAMS,
    &chat::SENT_TOKENS,
    &chat::MESSAGE,
    &chat::CONTENT_PART,
    &chat::CALL,
    &chat::CALLED_FUNCTION,
    &chat::TOOL,
    &chat::FUNCTION,
    &responses::TEXT,
    &responses::REASONING,
    &responses::MESSAGE,
    &responses::CONTENT,
    &responses::CALL,
    &responses::CALL_OUTPUT,
    &responses::THOUGHT,
    &responses::REFERENCE,
    &responses::TOOL,
    &messages::MESSAGE,
    &messages::BLOCK,
    &messages::CACHE_CONTROL,
    &messages::THINKING_BLOCK,
    &messages::TOOL_USE,
    &messages::TOOL_RESULT,
    &messages::TOOL,
    &messages::TOOL_CHOICE,
    &messages::THINKING,
    &messages::OUTPUT_CONFIG,
    &batch::EXPIRY,
    &ollama::OPTIONS,
    &ollama::MESSAGE,
    &ollama::CALL,
    &ollama::CALLED_FUNCTION,
];

/// The known fields of one JSON object.
pub struct FieldTable {
    /// The name of the object's schema.
    pub name: &'static str,
    /// If several groups have a field, the first of them counts.
    groups: &'static [&'static [Field]],
    kind: Kind,
}

enum Kind {
    /// The body of a request, or Ollama's `options`. The fields of `EVERYWHERE` are known there too.
    Body,
    /// A body that clients also send to the endpoints of these tables. Fields that only those endpoints read are
    /// accepted and passed over.
    BodyOf(&'static [&'static FieldTable]),
    /// An object within a body.
    Object,
}

/// The fields that no body needs to list.
static EVERYWHERE: [&[Field]; 2] = [without_effect::EVERYWHERE, refused::EVERYWHERE];

/// A field of a JSON object.
pub struct Field {
    pub name: &'static str,
    pub treatment: Treatment,
    is_required: bool,
    /// The field's effect, or why it has none, or advice for the caller.
    pub about: &'static str,
}

/// The treatment of a field that is not `null`.
pub enum Treatment {
    /// Read, if the value is of this schema.
    Read(fn(&Limits) -> Schema),
    /// Accepted but not read.
    NoEffect,
    /// Refused, unless its value asks for Corella's behaviour.
    Refused(fn(&Value) -> bool),
}

impl FieldTable {
    const fn body(name: &'static str) -> Self {
        Self {
            name,
            groups: &[],
            kind: Kind::Body,
        }
    }

    const fn object(name: &'static str) -> Self {
        Self {
            kind: Kind::Object,
            ..Self::body(name)
        }
    }

    /// Names the tables of the endpoints to which clients send the same body.
    const fn beside(mut self, others: &'static [&'static Self]) -> Self {
        self.kind = Kind::BodyOf(others);
        self
    }

    const fn of(mut self, groups: &'static [&'static [Field]]) -> Self {
        self.groups = groups;
        self
    }

    pub fn find(&self, name: &str) -> Option<&'static Field> {
        self.rows().find(|field| field.name == name)
    }

    /// Returns whether the field is read.
    pub fn reads(&self, name: &str) -> bool {
        self.find(name).is_some_and(Field::is_read)
    }

    /// Returns whether the field is accepted because another endpoint reads it.
    pub fn passes_over(&self, name: &str) -> bool {
        let Kind::BodyOf(others) = self.kind else {
            return false;
        };
        others.iter().any(|other| other.reads(name))
    }

    pub fn fields(&self) -> impl Iterator<Item = &'static Field> {
        let is_first = move |field: &&'static Field| {
            let first = self.find(field.name);
            first.is_some_and(|first| ptr::eq(first, *field))
        };
        self.rows().filter(is_first)
    }

    /// The rows of all groups. If a later row has the name of an earlier one, the earlier row counts.
    fn rows(&self) -> impl Iterator<Item = &'static Field> {
        let everywhere = match self.kind {
            Kind::Body | Kind::BodyOf(_) => &EVERYWHERE[..],
            Kind::Object => &[],
        };
        let groups = self.groups.iter().chain(everywhere);
        groups.flat_map(|group| group.iter())
    }

    /// Returns the schema of the object, with the fields that are read and, if `has_all`, those accepted without
    /// effect.
    pub fn schema(&self, limits: &Limits, has_all: bool) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for field in self.fields() {
            let schema = match field.treatment {
                Treatment::Read(_) => field.schema(limits),
                Treatment::NoEffect if has_all => {
                    json!({"description": format!("No effect: {}.", field.about)})
                }
                Treatment::NoEffect | Treatment::Refused(_) => continue,
            };
            properties.insert(field.name.to_owned(), schema);
            if field.is_required {
                required.push(field.name);
            }
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            // A null member of any name counts as absent.
            "additionalProperties": {"type": "null"},
        })
    }
}

impl Field {
    pub fn is_read(&self) -> bool {
        matches!(self.treatment, Treatment::Read(_))
    }

    /// Returns the schema of the field, if it is read.
    pub fn schema(&self, limits: &Limits) -> Value {
        let Treatment::Read(schema) = self.treatment else {
            return json!({});
        };
        let schema = match self.is_required {
            true => schema(limits),
            false => schema(limits).or_null(),
        };
        match self.about {
            "" => schema.into_json(),
            about => schema.about(about).into_json(),
        }
    }

    /// Marks a field that the object must have.
    const fn required(mut self) -> Self {
        self.is_required = true;
        self
    }

    const fn about(mut self, sentence: &'static str) -> Self {
        self.about = sentence;
        self
    }

    /// Accepts values that ask for Corella's own behaviour.
    const fn unless(mut self, is_neutral: fn(&Value) -> bool) -> Self {
        self.treatment = Treatment::Refused(is_neutral);
        self
    }
}

const fn read(name: &'static str, schema: fn(&Limits) -> Schema) -> Field {
    Field {
        name,
        treatment: Treatment::Read(schema),
        is_required: false,
        about: "",
    }
}

const fn no_effect(name: &'static str, reason: &'static str) -> Field {
    Field {
        name,
        treatment: Treatment::NoEffect,
        is_required: false,
        about: reason,
    }
}

const fn refuse(name: &'static str, is_neutral: fn(&Value) -> bool) -> Field {
    instead(name, "leave it out").unless(is_neutral)
}

const fn instead(name: &'static str, advice: &'static str) -> Field {
    Field {
        name,
        treatment: Treatment::Refused(refused::never),
        is_required: false,
        about: advice,
    }
}
