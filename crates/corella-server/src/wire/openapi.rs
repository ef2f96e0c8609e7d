//! Describes this server's API as an OpenAPI 3.1 document.
//!
//! The fields of a body come from the tables that check requests, so that the document describes the server's treatment
//! of each field. The rest is in JSON files.

pub mod operation;

use serde_json::{Map, Value, json};

use crate::config::serve_config::ServeConfig;
use crate::wire::field_table::{Endpoint, Limits, OBJECTS};
use crate::wire::nearest_route::Route;

use operation::{OPERATIONS, Operation};

const DOCUMENT: &str = include_str!("openapi/document.json");

/// The operations without a table of fields, in a short form: `answer` names the schema of an answer, and `media` lists
/// the content types of an answer that is no JSON. Parameters in paths and the possible errors are added to each
/// operation.
const PATHS: &str = include_str!("openapi/paths.json");

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
    let document = document(&ServeConfig::new("", 1, 1, 1), false);
    let paths = document["paths"].as_object().into_iter().flatten();
    let routes = paths.map(|(path, methods)| Route {
        path: path.clone(),
        methods: methods
            .as_object()
            .into_iter()
            .flat_map(|methods| methods.keys().map(|method| method.to_uppercase()))
            .collect(),
    });
    routes.collect()
}

/// `needs_key` says whether callers need an API key.
pub fn document(config: &ServeConfig, needs_key: bool) -> Value {
    let limits = limits(config);
    let mut paths = Map::new();
    let mut components: Map<_, _> = ANSWERS
        .iter()
        .flat_map(|answers| members(answers))
        .collect();
    for table in OBJECTS {
        components.insert(table.name.to_owned(), table.schema(&limits, true));
    }
    for operation in OPERATIONS {
        let table = operation.endpoint.table();
        if operation.endpoint == Endpoint::Classify && config.sentence.classes.is_none() {
            let path = operation.endpoint.path().to_owned();
            paths.insert(path, json!({"post": refused_operation(operation)}));
            continue;
        }
        let schema = table.schema(&limits, operation.may_stream);
        components.insert(table.name.to_owned(), schema);
        let object = operation_object(operation, table.name);
        for path in operation.endpoint.other_paths() {
            let mut same = object.clone();
            same["operationId"] = json!(path.replace('/', "_"));
            paths.insert((*path).to_owned(), json!({"post": same}));
        }
        let path = operation.endpoint.path().to_owned();
        paths.insert(path, json!({"post": object}));
    }
    for (path, methods) in members(PATHS) {
        let known = paths.entry(path.clone()).or_insert_with(|| json!({}));
        for (method, operation) in methods.as_object().into_iter().flatten() {
            known[method] = whole_operation(&path, operation.clone());
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
    let mut document = Value::from(members(DOCUMENT));
    document["info"]["version"] = json!(env!("CARGO_PKG_VERSION"));
    document["info"]["license"] = json!({"name": env!("CARGO_PKG_LICENSE")});
    if !needs_key {
        document["security"] = json!([]);
    }
    document["paths"] = Value::Object(paths);
    document["components"]["schemas"] = Value::Object(components);
    document
}

/// The bounds of this server's fields.
fn limits(config: &ServeConfig) -> Limits {
    Limits {
        model_names: config.served_model_names.clone(),
        max_model_len: config.max_model_len,
        max_token_id: config.vocab_size.saturating_sub(1),
        max_logprobs: config.max_logprobs,
        max_num_choices: config.max_num_choices,
        vector_len: config.vector_len(),
        prompt_names: config.sentence.prompts.keys().cloned().collect(),
        is_encoder: config.is_encoder,
    }
}

/// The members of a file of this folder.
fn members(file: &str) -> Map<String, Value> {
    serde_json::from_str(file).expect("a file of this folder is a JSON object")
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

/// Completes the short form of an operation.
fn whole_operation(path: &str, mut operation: Value) -> Value {
    let mut parameters: Vec<Value> = path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(|name| {
            let schema = json!({"type": "string", "minLength": 1});
            json!({"name": name, "in": "path", "required": true, "schema": schema})
        })
        .collect();
    if let Value::Array(others) = operation["parameters"].take() {
        parameters.extend(others);
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    let mut response = json!({"description": "The answer."});
    if let Some(answer) = operation["answer"].take().as_str() {
        response["content"] = json_content(answer);
    }
    for media in operation["media"].take().as_array().into_iter().flatten() {
        let media = media.as_str().unwrap_or_default();
        response["content"][media] = json!({});
    }
    if let Value::Object(operation) = &mut operation {
        operation.retain(|_, member| !member.is_null());
    }
    operation["responses"] = json!({"200": response});
    operation
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described() {
        let config = ServeConfig::new("model", 64, 100, 16);
        let document = document(&config, false);
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
        let document = document(&ServeConfig::new("model", 64, 100, 16), false);
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
