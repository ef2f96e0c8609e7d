//! `/openapi.json`: what this server answers, as an OpenAPI 3.1 document.
//!
//! The fields of a body come from the tables by which requests are checked, so that the document says of
//! each field what the server does with it.

mod answer_schema;
mod field_schema;
mod ollama;
mod operation;
mod stored;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::call::json_response;
use crate::field_table::{Endpoint, FieldTable, Treatment};
use crate::serve_config::ServeConfig;
use crate::server_state::ServerState;

use field_schema::{FieldSchemas, object_schemas};
use operation::{OPERATIONS, Operation, SIMPLE, Simple};

pub async fn openapi(State(state): State<Arc<ServerState>>) -> Response {
    json_response(&document(&state.config))
}

fn document(config: &ServeConfig) -> Value {
    let schemas = FieldSchemas { config };
    let mut paths = Map::new();
    let mut components = object_schemas();
    components.extend(answer_schema::answer_schemas());
    for operation in OPERATIONS {
        let name = format!("{:?}Request", operation.endpoint);
        components.insert(name.clone(), body_schema(operation, &schemas));
        let object = operation_object(operation, &name);
        for path in operation.endpoint.other_paths() {
            let mut same = object.clone();
            same["operationId"] = json!(path.replace('/', "_"));
            paths.insert((*path).to_owned(), json!({"post": same}));
        }
        let path = operation.endpoint.path().to_owned();
        paths.insert(path, json!({"post": object}));
    }
    for simple in SIMPLE {
        let path = paths.entry(simple.path).or_insert_with(|| json!({}));
        path[simple.method] = simple_object(simple);
    }
    paths["/role"]["post"] = json!({
        "operationId": "changeRole",
        "summary": "Changes the role among other nodes, and answers when it has changed.",
        "requestBody": json_body(json!({
            "type": "object", "required": ["role"], "additionalProperties": false,
            "properties": {"role": {"enum": ["unified", "prefill", "decode"]}},
        })),
        "responses": responses("Role", None, "Error"),
    });
    paths.insert(
        "/v1/models/{model}".to_owned(),
        json!({"get": {
            "operationId": "retrieveModel",
            "summary": "Tells about the model under one of its names.",
            "parameters": [{
                "name": "model", "in": "path", "required": true,
                "schema": {"type": "string", "minLength": 1},
            }],
            "responses": responses("Model", None, "Error"),
        }}),
    );
    paths.insert(
        "/metrics".to_owned(),
        json!({"get": {
            "operationId": "getMetrics",
            "summary": "The metrics, as OpenMetrics text.",
            "security": [],
            "responses": {
                "200": {"description": "The metrics.", "content": {"application/openmetrics-text": {
                    "schema": {"type": "string"},
                }}},
                "default": error("Error"),
            },
        }}),
    );
    paths.insert(
        "/engine/events".to_owned(),
        json!({"get": {
            "operationId": "watchEngine",
            "summary": "Tells what the engine does, several times a second, until the client leaves.",
            "responses": {
                "200": {"description": "Events `server` and `snapshot`.", "content": {"text/event-stream": {}}},
                "default": error("Error"),
            },
        }}),
    );
    paths.insert(
        "/".to_owned(),
        json!({"get": {
            "operationId": "getPage",
            "summary": "A page to chat with the model and to see what the engine does.",
            "security": [],
            "responses": {
                "200": {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}},
                "default": error("Error"),
            },
        }}),
    );
    paths["/v1/batches"]["get"] = stored::list_batches();
    paths.extend(stored::paths());
    let file = json!({"schema": {"type": "string"}});
    paths.insert(
        "/page/{file}".to_owned(),
        json!({"get": {
            "operationId": "getPageFile",
            "summary": "A file that the page is made of.",
            "security": [],
            "parameters": [{
                "name": "file", "in": "path", "required": true,
                "schema": {"type": "string", "minLength": 1},
            }],
            "responses": {
                "200": {"description": "The file.", "content": {
                    "text/javascript": file, "text/css": file, "image/svg+xml": file,
                }},
                "default": error("Error"),
            },
        }}),
    );
    let security = match config.api_keys.is_empty() {
        true => json!([]),
        false => json!([{"bearer": []}, {"header": []}]),
    };
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Corella",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A server of language models that speaks OpenAI's API, Anthropic's and Ollama's. \
                Fields that are not in a schema are refused with 400.",
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        "security": security,
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

fn operation_object(operation: &Operation, body: &str) -> Value {
    let (errors, stream) = match operation.endpoint {
        Endpoint::Messages | Endpoint::CountTokens => ("AnthropicError", "text/event-stream"),
        endpoint if is_of_ollama(endpoint.path()) => ("OllamaError", "application/x-ndjson"),
        _ => ("Error", "text/event-stream"),
    };
    let stream = operation.may_stream.then_some(stream);
    json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "requestBody": json_body(reference(body)),
        "responses": responses(operation.answer, stream, errors),
    })
}

fn is_of_ollama(path: &str) -> bool {
    path.starts_with("/api/")
}

fn simple_object(simple: &Simple) -> Value {
    let errors = match is_of_ollama(simple.path) {
        true => "OllamaError",
        false => "Error",
    };
    let mut object = json!({
        "operationId": simple.id,
        "summary": simple.summary,
        "responses": match simple.answer {
            Some(answer) => responses(answer, None, errors),
            None => json!({"200": {"description": "Done."}, "default": error(errors)}),
        },
    });
    if !simple.needs_key {
        object["security"] = json!([]);
    }
    object
}

fn json_body(schema: Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

/// `stream` is the media type of a streamed answer, if there may be one.
fn responses(answer: &str, stream: Option<&str>, errors: &str) -> Value {
    let mut content = json!({"application/json": {"schema": reference(answer)}});
    if let Some(stream) = stream {
        content[stream] = json!({});
    }
    json!({
        "200": {"description": "The answer.", "content": content},
        "default": error(errors),
    })
}

fn error(schema: &str) -> Value {
    json!({
        "description": "Why there is no answer.",
        "content": {"application/json": {"schema": reference(schema)}},
    })
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// The schema of a body, with the fields that are read and those that are accepted without effect.
fn body_schema(operation: &Operation, schemas: &FieldSchemas) -> Value {
    let endpoint = operation.endpoint;
    let schema = |name: &str| schemas.of_field(endpoint, name);
    let mut object = table_schema(
        endpoint.table(),
        |name, treatment| match treatment {
            Treatment::NoEffect(_) => operation.may_stream,
            _ => is_heeded(endpoint, name, treatment),
        },
        schema,
    );
    if !operation.required.is_empty() {
        object["required"] = json!(operation.required);
    }
    object
}

/// Whether a field makes a difference at an endpoint. Those that count or convert tokens accept the fields
/// of those that generate, so that a request can be sent to both, and leave them unread.
fn is_heeded(endpoint: Endpoint, name: &str, treatment: &Treatment) -> bool {
    match treatment {
        Treatment::Read => match endpoint {
            Endpoint::Tokenize => matches!(name, "model" | "add_special_tokens"),
            Endpoint::Detokenize => name == "model",
            Endpoint::CountTokens => matches!(name, "model" | "messages" | "system" | "thinking"),
            _ => true,
        },
        Treatment::ReadAt(_) if endpoint == Endpoint::Tokenize && is_of_answer(name) => false,
        Treatment::ReadAt(endpoints) => endpoints.contains(&endpoint),
        Treatment::NoEffect(_) | Treatment::Refused(_) => false,
    }
}

/// Whether a field of `/v1/completions` says what becomes of the tokens of a prompt, and not which they are.
fn is_of_answer(name: &str) -> bool {
    matches!(name, "best_of" | "suffix")
}

/// The schema of an object whose fields are those of a table for which `is_shown`.
fn table_schema(
    table: &FieldTable,
    is_shown: impl Fn(&str, &Treatment) -> bool,
    schema: impl Fn(&str) -> Option<Value>,
) -> Value {
    let mut properties = Map::new();
    for name in table.names() {
        let Some(treatment) = table
            .find(name)
            .filter(|treatment| is_shown(name, treatment))
        else {
            continue;
        };
        let schema = match treatment {
            Treatment::NoEffect(reason) => {
                Some(json!({"description": format!("No effect: {reason}.")}))
            }
            _ => schema(name),
        };
        properties.insert(name.to_owned(), schema.unwrap_or_else(|| json!({})));
    }
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field_table;

    /// A field that is read and has no schema would be described as taking anything.
    #[test]
    fn every_field_that_is_read_has_a_schema() {
        let config = ServeConfig::new("model", 64, 100, 16);
        let schemas = FieldSchemas { config: &config };
        let mut missing = Vec::new();
        for operation in OPERATIONS {
            let endpoint = operation.endpoint;
            for name in endpoint.table().names() {
                let treatment = endpoint.table().find(name);
                let is_read = treatment.is_some_and(|known| is_heeded(endpoint, name, &known));
                if is_read && schemas.of_field(endpoint, name).is_none() {
                    missing.push(format!("{name} of {}", endpoint.path()));
                }
            }
        }
        let objects = [
            ("stream_options", &field_table::STREAM_OPTIONS),
            ("messages[]", &field_table::MESSAGE),
            ("messages[].content[]", &field_table::CONTENT_PART),
            ("messages[].tool_calls[]", &field_table::CALL),
            (
                "messages[].tool_calls[].function",
                &field_table::CALLED_FUNCTION,
            ),
            ("tools[]", &field_table::TOOL),
            ("tools[].function", &field_table::FUNCTION),
            ("messages[]", &field_table::ollama::MESSAGE),
            ("messages[].tool_calls[]", &field_table::ollama::CALL),
            ("messages[]", &field_table::messages::MESSAGE),
            ("messages[].content[]", &field_table::messages::BLOCK),
            ("input[]", &field_table::responses::MESSAGE),
            ("input[].content[]", &field_table::responses::CONTENT),
            ("reasoning", &field_table::responses::REASONING),
            ("tools[]", &field_table::responses::TOOL),
            ("input[]", &field_table::responses::CALL),
            ("input[]", &field_table::responses::CALL_OUTPUT),
            ("input[]", &field_table::responses::THOUGHT),
            ("thinking", &field_table::messages::THINKING),
            ("tools[]", &field_table::messages::TOOL),
            ("tool_choice", &field_table::messages::TOOL_CHOICE),
            ("messages[].content[]", &field_table::messages::TOOL_USE),
            ("messages[].content[]", &field_table::messages::TOOL_RESULT),
            (
                "messages[].content[]",
                &field_table::messages::THINKING_BLOCK,
            ),
        ];
        for (object, table) in objects {
            for name in table.names() {
                let is_read = matches!(table.find(name), Some(Treatment::Read));
                if is_read && field_schema::of_member(name).is_none() {
                    missing.push(format!("{name} of {object}"));
                }
            }
        }
        assert!(
            missing.is_empty(),
            "no schema in field_schema.rs: {missing:?}"
        );
    }

    #[test]
    fn every_route_is_described() {
        let config = ServeConfig::new("model", 64, 100, 16);
        let document = document(&config);
        let router = include_str!("router.rs");
        let routes: Vec<&str> = { router.split(".route(\"").skip(1) }
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert!(routes.len() > 10);
        for route in routes {
            let path = route.replace("{*name}", "{model}");
            assert!(
                document["paths"].get(&path).is_some(),
                "{path} is not described"
            );
        }
    }
}
