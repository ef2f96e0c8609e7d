//! `/v1/models`: lists the one model under each of its names, and its adapters.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde::Serialize;

use crate::adapter::served_adapter::ServedAdapter;
use crate::call::call_context::CallContext;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    /// The model that an adapter changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a str>,
    max_model_len: u32,
}

impl<'a> Model<'a> {
    fn new(state: &'a ServerState, id: &'a str) -> Self {
        Self {
            id,
            object: "model",
            created: state.started_unix_s,
            owned_by: "corella",
            root: state.config.model_name(),
            parent: None,
            max_model_len: state.config.max_model_len,
        }
    }

    fn of_adapter(state: &'a ServerState, id: &'a str, adapter: &'a ServedAdapter) -> Self {
        Self {
            created: adapter.created,
            root: &adapter.path,
            parent: Some(state.config.model_name()),
            ..Self::new(state, id)
        }
    }
}

pub async fn list_models(State(state): State<Arc<ServerState>>, context: CallContext) -> Response {
    let is_allowed = |name: &str| context.check_model(&state.config, name).is_ok();
    let names = state
        .config
        .served_model_names
        .iter()
        .filter(|name| is_allowed(name));
    let models = names.map(|name| Model::new(&state, name));
    let adapters = state.served.adapters.list();
    let of_adapters = adapters.iter().filter(|(name, _)| is_allowed(name));
    let of_adapters = of_adapters.map(|(name, adapter)| Model::of_adapter(&state, name, adapter));
    json_response(&ModelList {
        object: "list",
        data: models.chain(of_adapters).collect(),
    })
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
        Some(adapter) => Model::of_adapter(&state, &name, adapter),
        None => Model::new(&state, &name),
    }))
}
