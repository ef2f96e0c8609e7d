//! `/v1/models`: lists the models under each of their names, and their adapters.

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::adapter::served_adapter::ServedAdapter;
use crate::call::call_context::CallContext;
use crate::model_set::driver::ModelSet;
use crate::model_set::model_table::ModelStatus;
use crate::model_set::model_view::ModelView;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

/// `max_model_len` is `null` before the first load.
fn model(models: &ModelSet, view: &ModelView, id: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": models.parts().started_unix_s,
        "owned_by": "corella",
        "root": view.setting.names.first(),
        "max_model_len": view.card.as_ref().map(|card| card.config.max_model_len),
        "status": status(view),
    })
}

/// The state in the form of llama.cpp's router, and Corella's figures.
fn status(view: &ModelView) -> Value {
    let mut status = json!({"value": view.status_name()});
    if let Some(memory) = view.memory().filter(|memory| memory.total() > 0) {
        status["memory_bytes"] = json!(memory.total());
    }
    if let Some(time) = view.loading_for {
        status["loading_s"] = json!(time.as_secs_f64());
    }
    if let ModelStatus::Failed { error, .. } = &view.status {
        status["failed"] = json!(true);
        status["error"] = json!(error.to_string());
    }
    status
}

/// `parent` is the model that the adapter changes. An adapter that is loaded with its model has no `root` before.
fn adapted_model(
    models: &ModelSet,
    view: &ModelView,
    id: &str,
    adapter: Option<&ServedAdapter>,
) -> Value {
    let mut model = model(models, view, id);
    let path = adapter.map(|adapter| &adapter.path);
    model["parent"] = std::mem::replace(&mut model["root"], json!(path));
    if let Some(adapter) = adapter {
        model["created"] = json!(adapter.created);
    }
    model
}

pub async fn list_models(State(models): State<ModelSet>, context: CallContext) -> Response {
    models.look_up().await;
    list_known_models(State(models), context).await
}

/// `/page/models.json`: the same list, without a new look for models that the server does not list. Pages ask often.
pub async fn list_known_models(State(models): State<ModelSet>, context: CallContext) -> Response {
    let mut data = Vec::new();
    let views = models.views_with_further();
    for view in &views {
        let names = view.setting.names.iter();
        let names = names.filter(|name| view.check_key(&context, name).is_ok());
        data.extend(names.map(|name| model(&models, view, name)));
    }
    for view in &views {
        let mut adapters = view.adapters();
        adapters.retain(|(name, _)| view.check_key(&context, name).is_ok());
        let adapters = adapters.iter();
        data.extend(
            adapters.map(|(name, adapter)| adapted_model(&models, view, name, adapter.as_ref())),
        );
    }
    json_response(&json!({"object": "list", "data": data}))
}

/// Names may contain slashes (`org/name`), so the route takes the whole rest of the path.
pub async fn retrieve_model(
    State(models): State<ModelSet>,
    context: CallContext,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    models.find_or_add(&context, &name).await;
    let id = models.check_key(&context, Some(&name))?;
    let mut views = models.views();
    let view = views.swap_remove(id.0);
    let mut adapters = view.adapters().into_iter();
    let adapter = adapters.find(|(adapter, _)| *adapter == name);
    Ok(json_response(&match adapter {
        Some((_, adapter)) => adapted_model(&models, &view, &name, adapter.as_ref()),
        None => model(&models, &view, &name),
    }))
}
