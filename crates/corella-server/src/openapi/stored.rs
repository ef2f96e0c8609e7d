//! The paths of what stays on the server after a request: responses, files and batches.

use serde_json::{Map, Value, json};

use super::{error, reference, responses};

pub fn paths() -> Map<String, Value> {
    let kept = json!({
        "get": of_one("retrieveResponse", "A response that is kept.", "Response"),
        "delete": of_one("deleteResponse", "Forgets a response.", "Deleted"),
    });
    let input_items = json!({"get": {
        "operationId": "listInputItems",
        "summary": "The input of a response that is kept.",
        "parameters": list_parameters(100),
        "responses": {
            "200": {"description": "The items.", "content": {"application/json": {
                "schema": reference("ObjectList"),
            }}},
            "default": error("Error"),
        },
    }});
    let mut input_items = input_items;
    if let Some(parameters) = input_items["get"]["parameters"].as_array_mut() {
        parameters.push(in_path("id"));
    }
    let mut files_parameters = list_parameters(10_000);
    if let Some(parameters) = files_parameters.as_array_mut() {
        parameters.push(json!({"name": "purpose", "in": "query", "schema": {"type": "string"}}));
    }
    let files = json!({
        "get": {
            "operationId": "listFiles",
            "summary": "Lists files.",
            "parameters": files_parameters,
            "responses": responses("ObjectList", None, "Error"),
        },
        "post": {
            "operationId": "uploadFile",
            "summary": "Uploads a file of requests.",
            "requestBody": {"required": true, "content": {"multipart/form-data": {"schema": {
                "type": "object", "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": "batch"},
                },
            }}}},
            "responses": responses("File", None, "Error"),
        },
    });
    let file = json!({
        "get": of_one("retrieveFile", "Tells about a file.", "File"),
        "delete": of_one("deleteFile", "Deletes a file.", "Deleted"),
    });
    let content = json!({"get": {
        "operationId": "fileContent",
        "summary": "The content of a file.",
        "parameters": [in_path("id")],
        "responses": {
            "200": {"description": "The content.", "content": {"application/octet-stream": {}}},
            "default": error("Error"),
        },
    }});
    let batch = json!({"get": of_one("retrieveBatch", "Tells how far a batch is.", "Batch")});
    let cancel = json!({"post": of_one("cancelBatch", "Ends a batch early.", "Batch")});
    let paths = [
        ("/v1/responses/{id}", kept),
        ("/v1/responses/{id}/input_items", input_items),
        ("/v1/files", files),
        ("/v1/files/{id}", file),
        ("/v1/files/{id}/content", content),
        ("/v1/batches/{id}", batch),
        ("/v1/batches/{id}/cancel", cancel),
    ];
    Map::from_iter(paths.map(|(path, object)| (path.to_owned(), object)))
}

pub fn list_batches() -> Value {
    json!({
        "operationId": "listBatches",
        "summary": "Lists batches.",
        "parameters": list_parameters(100),
        "responses": responses("ObjectList", None, "Error"),
    })
}

/// An operation on the object that the path names.
fn of_one(operation: &str, summary: &str, answer: &str) -> Value {
    json!({
        "operationId": operation,
        "summary": summary,
        "parameters": [in_path("id")],
        "responses": responses(answer, None, "Error"),
    })
}

fn in_path(name: &str) -> Value {
    json!({
        "name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
    })
}

fn list_parameters(max_limit: usize) -> Value {
    let parameter =
        |name: &str, schema: Value| json!({"name": name, "in": "query", "schema": schema});
    json!([
        parameter(
            "limit",
            json!({"type": "integer", "minimum": 1, "maximum": max_limit})
        ),
        parameter("order", json!({"enum": ["asc", "desc"]})),
        parameter("after", json!({"type": "string"})),
    ])
}
