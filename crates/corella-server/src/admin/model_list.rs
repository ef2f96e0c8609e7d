//! `/v1/models`: lists the one model under each of its names, and its adapters.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::adapter::served_adapter::ServedAdapter;
use crate::call::call_context::CallContext;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

fn model(state: &ServerState, id: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": state.started_unix_s,
        "owned_by": "corella",
        "root": state.config.model_name(),
        "max_model_len": state.config.max_model_len,
    })
}

/// `parent` is the model that the adapter changes.
fn adapted_model(state: &ServerState, id: &str, adapter: &ServedAdapter) -> Value {
    let mut model = model(state, id);
    model["created"] = json!(adapter.created);
    model["root"] = json!(adapter.path);
    model["parent"] = json!(state.config.model_name());
    model
}

pub async fn list_models(State(state): State<Arc<ServerState>>, context: CallContext) -> Response {
    let is_allowed = |name: &str| context.check_model(&state.config, name).is_ok();
    let names = state
        .config
        .served_model_names
        .iter()
        .filter(|name| is_allowed(name));
    let models = names.map(|name| model(&state, name));
    let adapters = state.served.adapters.list();
    let of_adapters = adapters.iter().filter(|(name, _)| is_allowed(name));
    let of_adapters = of_adapters.map(|(name, adapter)| adapted_model(&state, name, adapter));
    let data: Vec<_> = models.chain(of_adapters).collect();
    json_response(&json!({"object": "list", "data": data}))
}

/// Names may contain slashes (`org/name`), so the route takes the whole rest of the path.
pub async fn retrieve_model(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    context.check_model(&state.config, &name)?;
    let name = state.served.check_name(Some(&name))?;
    Ok(json_response(&match &state.served.adapters.get(&name) {
        Some(adapter) => adapted_model(&state, &name, adapter),
        None => model(&state, &name),
    }))
}
