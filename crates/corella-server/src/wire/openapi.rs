//! Describes this server's API as an OpenAPI 3.1 document.
//!
//! The fields of a body come from the tables that check requests, so that the document describes the server's treatment
//! of each field. The rest is in JSON files.

mod field_schema;
mod operation;
mod template;

use serde_json::{Map, Value, json};

use crate::config::serve_config::ServeConfig;
use crate::wire::field_table::{Endpoint, FieldTable, Treatment};
use crate::wire::nearest_route::Route;

use field_schema::FieldSchemas;
use operation::{OPERATIONS, Operation};
use template::Blanks;

const DOCUMENT: &str = include_str!("openapi/document.json");

/// The operations without a table of fields. The possible errors are added to each.
const PATHS: [&str; 4] = [
    include_str!("openapi/paths/server.json"),
    include_str!("openapi/paths/llama_server.json"),
    include_str!("openapi/paths/stored.json"),
    include_str!("openapi/paths/page.json"),
];

const ANSWERS: [&str; 9] = [
    include_str!("openapi/answers/llama_server.json"),
    include_str!("openapi/answers/completion.json"),
    include_str!("openapi/answers/ollama.json"),
    include_str!("openapi/answers/stored.json"),
    include_str!("openapi/answers/response.json"),
    include_str!("openapi/answers/message.json"),
    include_str!("openapi/answers/pooling.json"),
    include_str!("openapi/answers/server.json"),
    include_str!("openapi/answers/error.json"),
];

/// The paths of the document, with their methods.
pub fn routes() -> Vec<Route> {
    let document = document(&ServeConfig::new("", 1, 1, 1));
    let paths = document["paths"].as_object().into_iter().flatten();
    let routes = paths.map(|(path, methods)| Route {
        path: path.clone(),
        methods: { methods.as_object().into_iter() }
            .flat_map(|methods| methods.keys().map(|method| method.to_uppercase()))
            .collect(),
    });
    routes.collect()
}

pub fn document(config: &ServeConfig) -> Value {
    let blanks = Blanks::of(config);
    let schemas = FieldSchemas::new(&blanks);
    let mut paths = Map::new();
    let mut components = schemas.objects();
    components.extend(blanks.fill_all(&ANSWERS));
    for operation in OPERATIONS {
        if operation.endpoint == Endpoint::Classify && config.sentence.classes.is_none() {
            let path = operation.endpoint.path().to_owned();
            paths.insert(path, json!({"post": refused_operation(operation)}));
            continue;
        }
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
    for (path, methods) in PATHS.iter().flat_map(|file| blanks.fill_all(&[file])) {
        let known = paths.entry(path).or_insert_with(|| json!({}));
        if let (Value::Object(known), Value::Object(methods)) = (known, methods) {
            known.extend(methods);
        }
    }
    for (path, methods) in &mut paths {
        let operations = methods
            .as_object_mut()
            .into_iter()
            .flat_map(Map::values_mut);
        for operation in operations {
            operation["responses"]["default"] = error(path);
        }
    }
    let mut document = blanks.fill(DOCUMENT);
    if config.api_keys.is_empty() {
        document["security"] = json!([]);
    }
    document["paths"] = Value::Object(paths);
    document["components"]["schemas"] = Value::Object(components);
    document
}

fn operation_object(operation: &Operation, body: &str) -> Value {
    let mut content = json_content(operation.answer);
    if operation.may_stream {
        let stream = match is_of_ollama(operation.endpoint.path()) {
            true => "application/x-ndjson",
            false => "text/event-stream",
        };
        content[stream] = json!({});
    }
    json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "requestBody": {"required": true, "content": json_content(body)},
        "responses": {"200": {"description": "The answer.", "content": content}},
    })
}

/// An operation that the model never supports.
fn refused_operation(operation: &Operation) -> Value {
    let summary = format!("Always 400 with this model. {}", operation.summary);
    json!({"operationId": operation.id, "summary": summary, "responses": {}})
}

fn is_of_ollama(path: &str) -> bool {
    path.starts_with("/api/")
}

fn error(path: &str) -> Value {
    let schema = match path {
        path if is_of_ollama(path) => "OllamaError",
        path if path.starts_with(Endpoint::Messages.path()) => "AnthropicError",
        _ => "Error",
    };
    json!({"description": "Why there is no answer.", "content": json_content(schema)})
}

/// A body of JSON with the schema of this name.
fn json_content(schema: &str) -> Value {
    let reference = format!("#/components/schemas/{schema}");
    json!({"application/json": {"schema": {"$ref": reference}}})
}

/// Returns the schema of a body, with the fields that are read and those accepted without effect.
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

/// Returns whether a field makes a difference at an endpoint. Endpoints that count or convert tokens accept the fields
/// of the generating endpoints, so that a request can be sent to both, but do not read them.
fn is_heeded(endpoint: Endpoint, name: &str, treatment: &Treatment) -> bool {
    match treatment {
        Treatment::Read => match endpoint {
            Endpoint::Tokenize => {
                matches!(name, "model" | "content" | "add_special_tokens")
            }
            Endpoint::Detokenize => name == "model",
            Endpoint::ApplyTemplate => name == "model",
            Endpoint::CountTokens => matches!(name, "model" | "messages" | "system" | "thinking"),
            _ => true,
        },
        Treatment::ReadAt(_) if endpoint == Endpoint::Tokenize && is_of_answer(name) => false,
        Treatment::ReadAt(endpoints) if endpoint == Endpoint::ApplyTemplate => {
            endpoints.contains(&Endpoint::Chat) && name != "top_logprobs"
        }
        Treatment::ReadAt(endpoints) => endpoints.contains(&endpoint),
        Treatment::NoEffect(_) | Treatment::Refused(_) => false,
    }
}

/// Returns whether a field of `/v1/completions` affects the answer and not the prompt's tokens.
fn is_of_answer(name: &str) -> bool {
    matches!(name, "best_of" | "suffix")
}

/// Returns the schema of an object with the fields of a table for which `is_shown`.
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
    // A null member of any name counts as absent.
    let others = json!({"type": "null"});
    json!({"type": "object", "properties": properties, "additionalProperties": others})
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::field_schema::{FIELDS, TABLES};
    use super::*;

    /// A field that is read but lacks a schema would be described as taking anything.
    #[test]
    fn every_field_that_is_read_has_a_schema() {
        let blanks = Blanks::of(&ServeConfig::new("model", 64, 100, 16));
        let schemas = FieldSchemas::new(&blanks);
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
        for (object, table) in TABLES {
            for name in table.names() {
                let is_read = matches!(table.find(name), Some(Treatment::Read));
                if is_read && schemas.of_member(name).is_none() {
                    missing.push(format!("{name} of {object}"));
                }
            }
        }
        assert!(
            missing.is_empty(),
            "no schema in fields/*.json: {missing:?}"
        );
    }

    #[test]
    fn every_route_is_described() {
        let config = ServeConfig::new("model", 64, 100, 16);
        let document = document(&config);
        let router = include_str!("../http/router.rs");
        let routes: Vec<&str> = router
            .split(".route(\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert!(routes.len() > 10);
        for route in routes {
            let path = { route.replace("{*name}", "{model}") }.replace("{*", "{");
            assert!(
                document["paths"].get(&path).is_some(),
                "{path} is not described"
            );
        }
    }
    #[test]
    fn every_reference_leads_to_a_schema() {
        let document = document(&ServeConfig::new("model", 64, 100, 16));
        let mut num_references = 0;
        for_each_text(&document, &mut |name, text| {
            if name == "$ref" {
                let place = text.strip_prefix('#').unwrap_or_default();
                let schema = document.pointer(place);
                assert!(schema.is_some_and(Value::is_object), "{text}");
                num_references += 1;
            }
        });
        assert!(num_references > 100, "{num_references}");
    }

    /// A misspelt name in angle brackets would stay in the document.
    #[test]
    fn every_file_is_json_whose_blanks_are_known() {
        let blanks = Blanks::of(&ServeConfig::new("model", 64, 100, 16));
        let mut folders = vec![
            PathBuf::from(env!("CARGO_MANIFEST_DIR"))
                .join("src/wire")
                .join("openapi"),
        ];
        let mut num_files = 0;
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("it can be listed") {
                let path = entry.expect("it can be listed").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path
                    .extension()
                    .is_some_and(|extension| extension == "json")
                {
                    let file = fs::read_to_string(&path).expect("it can be read");
                    for_each_text(&blanks.fill(&file), &mut |name, text| {
                        let is_blank = text.starts_with('<');
                        assert!(!is_blank, "{}: {name}: {text}", path.display());
                    });
                    num_files += 1;
                }
            }
        }
        let num_included = ANSWERS.len() + PATHS.len() + FIELDS.len() + 2;
        assert_eq!(num_files, num_included, "a file that is not read");
    }

    /// Calls `visit` with each text in a value, and the name of the member that has it.
    fn for_each_text(value: &Value, visit: &mut impl FnMut(&str, &str)) {
        match value {
            Value::Array(items) => {
                for item in items {
                    for_each_text(item, visit);
                    if let Value::String(text) = item {
                        visit("", text);
                    }
                }
            }
            Value::Object(members) => {
                for (name, member) in members {
                    for_each_text(member, visit);
                    if let Value::String(text) = member {
                        visit(name, text);
                    }
                }
            }
            _ => {}
        }
    }
}
