//! The JSON schema of each field that is read. `null` counts as absent.

use serde_json::{Map, Value, json};

use super::table_schema;
use super::template::Blanks;
use crate::wire::field_table::{
    self, Endpoint, FieldTable, Treatment, messages, ollama, responses,
};

/// The schemas of fields, in groups by endpoint. Group `all` serves endpoints whose own group lacks a field.
pub const FIELDS: [&str; 8] = [
    include_str!("fields/all.json"),
    include_str!("fields/response.json"),
    include_str!("fields/message.json"),
    include_str!("fields/pooling.json"),
    include_str!("fields/batch.json"),
    include_str!("fields/ollama.json"),
    include_str!("fields/llama_server.json"),
    include_str!("fields/member.json"),
];

/// The facts about objects within bodies that their tables do not have.
const OBJECTS: &str = include_str!("objects.json");

/// The tables of those objects, each after the objects within it.
pub const TABLES: [(&str, &FieldTable); 26] = [
    ("/OllamaMessage", &ollama::MESSAGE),
    ("/OllamaCall/properties/function", &ollama::CALLED_FUNCTION),
    ("/OllamaCall", &ollama::CALL),
    ("/ChatMessage", &field_table::MESSAGE),
    ("/ChatText", &field_table::CONTENT_PART),
    ("/StreamOptions", &field_table::STREAM_OPTIONS),
    ("/InputTurn", &messages::MESSAGE),
    ("/TextBlock", &messages::BLOCK),
    ("/InputMessage", &responses::MESSAGE),
    ("/InputText", &responses::CONTENT),
    ("/Reasoning", &responses::REASONING),
    ("/Thinking", &messages::THINKING),
    ("/ToolResult", &messages::TOOL_RESULT),
    ("/ToolUse", &messages::TOOL_USE),
    ("/ThinkingBlock", &messages::THINKING_BLOCK),
    ("/MessageTool", &messages::TOOL),
    ("/MessageToolChoice", &messages::TOOL_CHOICE),
    ("/ResponseTool", &responses::TOOL),
    ("/InputCall", &responses::CALL),
    ("/InputCallOutput", &responses::CALL_OUTPUT),
    ("/InputThought", &responses::THOUGHT),
    ("/InputReference", &responses::REFERENCE),
    ("/Tool", &field_table::TOOL),
    ("/Function", &field_table::FUNCTION),
    ("/ToolCall", &field_table::CALL),
    ("/CalledFunction", &field_table::CALLED_FUNCTION),
];

/// Schemas with the limits of one server.
pub struct FieldSchemas {
    groups: Map<String, Value>,
    objects: Value,
}

impl FieldSchemas {
    pub fn new(blanks: &Blanks) -> Self {
        Self {
            groups: blanks.fill_all(&FIELDS),
            objects: blanks.fill(OBJECTS),
        }
    }

    /// Returns the schema of a field of an endpoint's body, if the field has one.
    pub fn of_field(&self, endpoint: Endpoint, name: &str) -> Option<Value> {
        if endpoint == Endpoint::Infill && name == "prompt" {
            // This prompt continues `input_prefix`, and is a text.
            return Some(json!({"type": ["string", "null"]}));
        }
        let group = match endpoint {
            // Only a prompt that is a text can be repeated, so `echo` may not be true here.
            Endpoint::Chat => "chat",
            Endpoint::Completions => "completions",
            Endpoint::Tokenize => "tokenize",
            Endpoint::Detokenize => "all",
            Endpoint::Responses => "responses",
            Endpoint::Messages | Endpoint::CountTokens => "messages",
            Endpoint::Embeddings
            | Endpoint::Pooling
            | Endpoint::Score
            | Endpoint::Rerank
            | Endpoint::Classify => "pooling",
            Endpoint::ApplyTemplate => "all",
            Endpoint::LlamaCompletion | Endpoint::Infill | Endpoint::LlamaEmbedding => "llama",
            Endpoint::Batches => "batches",
            Endpoint::OllamaChat
            | Endpoint::OllamaGenerate
            | Endpoint::OllamaEmbed
            | Endpoint::OllamaEmbeddings
            | Endpoint::OllamaShow
            | Endpoint::OllamaPull => {
                if name == "options" {
                    return Some(self.ollama_options());
                }
                // Its `input` may be empty, which only asks to load the model.
                "ollama"
            }
        };
        self.in_group(group, name)
            .or_else(|| self.in_group("all", name))
    }

    /// Returns the schema of a member of a message, of one of its parts, or of `stream_options`.
    pub fn of_member(&self, name: &str) -> Option<Value> {
        self.in_group("members", name)
    }

    /// The schema of a member of Ollama's `options`.
    pub fn of_option(&self, name: &str) -> Option<Value> {
        self.in_group("ollama_options", name)
            .or_else(|| self.in_group("all", name))
    }

    fn in_group(&self, group: &str, name: &str) -> Option<Value> {
        self.groups.get(group)?.get(name).cloned()
    }

    fn ollama_options(&self) -> Value {
        let options = table_schema(&ollama::OPTIONS, is_shown, |name| self.of_option(name));
        json!({"anyOf": [options, {"type": "null"}]})
    }

    /// The objects within bodies.
    pub fn objects(&self) -> Map<String, Value> {
        let mut objects = self.objects.clone();
        for (place, table) in TABLES {
            if let Some(object) = objects.pointer_mut(place) {
                let own = object.take();
                *object = self.object(table, own);
            }
        }
        match objects {
            Value::Object(objects) => objects,
            _ => Map::new(),
        }
    }

    /// Returns the object of a table. Its file has `required`, and the `properties` that differ from members of the
    /// same name in other objects.
    fn object(&self, table: &FieldTable, mut own: Value) -> Value {
        let mut object = table_schema(table, is_shown, |name| self.of_member(name));
        if let Some(Value::Object(properties)) = own.get_mut("properties").map(Value::take) {
            for (name, schema) in properties {
                object["properties"][name] = schema;
            }
        }
        object["required"] = own["required"].take();
        object
    }
}

fn is_shown(_: &str, treatment: &Treatment) -> bool {
    !matches!(treatment, Treatment::Refused(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::serve_config::ServeConfig;

    #[test]
    fn every_table_has_its_object() {
        let blanks = Blanks::of(&ServeConfig::new("model", 64, 100, 16));
        let schemas = FieldSchemas::new(&blanks);
        for (place, _) in TABLES {
            let object = schemas.objects.pointer(place);
            let required = object.and_then(|object| object["required"].as_array());
            assert!(required.is_some(), "objects.json: {place}");
        }
        for (name, object) in schemas.objects() {
            assert!(
                object["anyOf"].is_array() || object["type"] == "object",
                "objects.json: /{name} has neither a schema nor a table"
            );
        }
    }
}
