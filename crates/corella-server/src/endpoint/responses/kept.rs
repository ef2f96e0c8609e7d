//! `/v1/responses/{id}`: reads and deletes kept responses.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::call::call_context::CallContext;
use crate::state::server_parts::ServerParts;
use crate::store::response_store::{ResponseKey, ResponseStore, Turn};
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;
use crate::wire::list_page::ListQuery;

use super::reference::INPUT_ITEM;

/// The data of a kept response besides the response itself.
pub struct Keeping {
    pub store: Arc<ResponseStore>,
    pub owner: Option<Arc<str>>,
    /// The earlier turns of the conversation.
    pub before: Vec<Arc<Turn>>,
    pub input: Vec<Map<String, Value>>,
}

impl Keeping {
    pub fn keep(self, id: &str, object: &Value) {
        let Self {
            store,
            owner,
            before,
            input,
        } = self;
        let id = id.into();
        let key = ResponseKey { owner, id };
        store.keep(key, before, &input, object);
    }
}

fn key(context: &CallContext, id: &str) -> ResponseKey {
    ResponseKey {
        owner: context.owner(),
        id: id.into(),
    }
}

pub async fn retrieve_response(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    if uri
        .query()
        .is_some_and(|query| query.contains("stream=true"))
    {
        let message = "the events of a kept response are not kept; leave it out";
        return Err(ApiError::invalid("stream", message));
    }
    let kept = server.responses.find(&key(&context, &id))?;
    Ok(json_response(&kept.turn.object()))
}

pub async fn delete_response(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    server.responses.delete(&key(&context, &id))?;
    Ok(json_response(
        &json!({"id": id, "object": "response", "deleted": true}),
    ))
}

/// `/v1/responses/{id}/input_items`: the input of the response's own request.
pub async fn list_input_items(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    const MAX_LIMIT: usize = 100;
    let others = ["include", "include[]"];
    let allow_unknown = server.config.allow_unknown_fields;
    let query = ListQuery::parse(&uri, MAX_LIMIT, &others, allow_unknown)?;
    let kept = server.responses.find(&key(&context, &id))?;
    let items = kept
        .turn
        .input_items()
        .into_iter()
        .enumerate()
        .map(|(index, item)| input_item(&id, index, item))
        .collect();
    Ok(json_response(&query.page(items)?))
}

/// Returns an item in OpenAI's form: with an id and a type, and a message's text as a part.
fn input_item(response: &str, index: usize, mut item: Map<String, Value>) -> Value {
    if item.get("id").is_none_or(Value::is_null) {
        item.insert(
            "id".to_owned(),
            json!(format!("{INPUT_ITEM}_{response}_{index}")),
        );
    }
    item.entry("type").or_insert_with(|| json!("message"));
    if item["type"] == "message"
        && let Some(Value::String(text)) = item.get("content")
    {
        let kind = match item["role"].as_str() {
            Some("assistant") => "output_text",
            _ => "input_text",
        };
        let content = json!([{"type": kind, "text": text}]);
        item.insert("content".to_owned(), content);
    }
    Value::Object(item)
}
