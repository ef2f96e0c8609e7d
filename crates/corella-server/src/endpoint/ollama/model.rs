//! Facts about models and the server for Ollama's clients.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_model::GenerationDefaults;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::answer::timestamp;
use crate::adapter::served_adapter::ServedAdapter;
use crate::call::call_context::CallContext;
use crate::config::serve_config::ModelFacts;
use crate::model_set::driver::ModelSet;
use crate::model_set::model_view::ModelView;
use crate::wire::api_error::ApiError;
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;

/// The version of Ollama's API. Clients ask for it before they use newer features.
const OLLAMA_VERSION: &str = "0.13.0";
/// The date of a model that is never unloaded: clients expect one, and cannot read later ones.
const NEVER: &str = "9999-12-31T23:59:59Z";
/// `NEVER` in seconds since 1970.
const NEVER_UNIX_S: u64 = 253_402_300_799;

/// Returns the entry of a model in a list. `size` is the planned memory if `is_running`, or the weights' where
/// nothing was planned; else it is the size of the files. A model that was never loaded has no facts.
fn model(models: &ModelSet, view: &ModelView, name: &str, is_running: bool) -> Value {
    let config = view.card.as_ref().map(|card| &card.config);
    let facts = config.map_or_else(ModelFacts::default, |config| config.model_facts.clone());
    // Clients show the digest's first digits, and tell models apart by the digest.
    let digest = Sha256::digest(name.as_bytes()).into_iter();
    let tagged = tagged(name);
    let mut model = json!({
        "name": tagged,
        "model": tagged,
        "modified_at": modified_at(models, view, name),
        "size": facts.file_bytes,
        "digest": digest.map(|byte| format!("{byte:02x}")).collect::<String>(),
        "details": details(view, &facts, name),
    });
    if is_running {
        let planned = view.memory().map_or(0, |memory| memory.total());
        model["size"] = json!(planned.max(facts.weight_bytes));
        model["expires_at"] = json!(expiry(view.expires_at));
        model["size_vram"] = json!(facts.gpu_weight_bytes);
        model["context_length"] = json!(config.map(|config| config.max_model_len));
    }
    model
}

/// Returns a name with its tag. Open WebUI adds `:latest` to a name without a tag before it looks into the list.
fn tagged(name: &str) -> String {
    match name.contains(':') {
        true => name.to_owned(),
        false => format!("{name}:latest"),
    }
}

fn expiry(time: Option<SystemTime>) -> String {
    let time = time.filter(|time| *time < UNIX_EPOCH + Duration::from_secs(NEVER_UNIX_S));
    time.map_or_else(|| NEVER.to_owned(), timestamp)
}

fn modified_at(models: &ModelSet, view: &ModelView, name: &str) -> String {
    let created_s = match adapter(view, name) {
        Some(adapter) => adapter.created,
        None => models.parts().started_unix_s,
    };
    timestamp(UNIX_EPOCH + Duration::from_secs(created_s))
}

fn adapter(view: &ModelView, name: &str) -> Option<ServedAdapter> {
    view.state.as_ref()?.served.adapters.get(name)
}

fn details(view: &ModelView, facts: &ModelFacts, name: &str) -> Value {
    let parent = adapter(view, name).and_then(|_| view.setting.names.first());
    let family = Some(&facts.family).filter(|family| !family.is_empty());
    json!({
        // The model that an adapter changes.
        "parent_model": parent.map_or("", String::as_str),
        "format": "",
        "family": facts.family,
        "families": Vec::from_iter(family),
        "parameter_size": parameter_size(facts.num_parameters),
        "quantization_level": facts.weight_format.to_uppercase(),
    })
}

/// Writes a number of parameters in Ollama's form: `596.05M`, `8.2B`.
fn parameter_size(num_parameters: u64) -> String {
    let num = num_parameters as f64;
    match num_parameters {
        0 => String::new(),
        1_000_000_000.. => format!("{:.1}B", num / 1e9),
        1_000_000.. => format!("{:.2}M", num / 1e6),
        1_000.. => format!("{:.0}K", num / 1e3),
        _ => num_parameters.to_string(),
    }
}

/// Returns the names of a model that a caller may use: its own and those of its adapters.
fn names(view: &ModelView, context: &CallContext) -> Vec<String> {
    let adapters = view.adapters().into_iter().map(|(name, _)| name);
    let names = view.setting.names.iter().cloned().chain(adapters);
    names
        .filter(|name| view.check_key(context, name).is_ok())
        .collect()
}

/// `/api/tags`: lists the models under each of their names, including names of Ollama's library, and their adapters.
pub async fn tags(State(models): State<ModelSet>, context: CallContext) -> Response {
    let mut list = Vec::new();
    models.look_up().await;
    for view in models.views_with_further() {
        // Before a request, programs look in this list for the name that they will send.
        let others = view.setting.other_names.iter();
        let others = others.filter(|name| view.check_key(&context, name).is_ok());
        let names = names(&view, &context).into_iter().chain(others.cloned());
        list.extend(names.map(|name| model(&models, &view, &name, false)));
    }
    json_response(&json!({"models": list}))
}

/// `/api/ps`: lists the loaded models and their adapters, without `other_names`, and when each is unloaded.
pub async fn running_models(State(models): State<ModelSet>, context: CallContext) -> Response {
    let mut list = Vec::new();
    for view in models.views().iter().filter(|view| view.state.is_some()) {
        let names = names(view, &context).into_iter();
        list.extend(names.map(|name| model(&models, view, &name, true)));
    }
    json_response(&json!({"models": list}))
}

/// `/api/version`.
pub async fn version() -> Response {
    json_response(&json!({"version": OLLAMA_VERSION}))
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ShowFields {
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

/// `/api/show`: a model's abilities, its template in Jinja, and its default parameters of sampling. The model is not
/// loaded, and this is no use of it. The Modelfile has no template, because Ollama's are in another language.
pub async fn show_model(
    State(models): State<ModelSet>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let fields: ShowFields = body.parse()?;
    body.check_fields(models.parts().field_check(Endpoint::OllamaShow))?;
    let asked = fields.model.or(fields.name);
    let asked = match &asked {
        Some(name) => Some(models.untagged(&context, name).await),
        None => None,
    };
    let id = models.check_key(&context, asked)?;
    let name = asked.map_or_else(|| models.name(id), str::to_owned);
    let card = models.card(id).await?;
    let view = models.views().swap_remove(id.0);
    let config = &card.config;
    let facts = &config.model_facts;
    let family = match facts.family.as_str() {
        "" => "decoder",
        family => family,
    };
    let parameters = parameters(&config.generation_defaults);
    Ok(json_response(&json!({
        "modelfile": modelfile(&name, &parameters),
        "parameters": parameters,
        "template": card.template,
        "details": details(&view, facts, &name),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.num_parameters,
            format!("{family}.context_length"): config.max_model_len,
            format!("{family}.embedding_length"): config.vector_len(),
            format!("{family}.vocab_size"): config.vocab_size,
        },
        "capabilities": card.capabilities,
        "modified_at": modified_at(&models, &view, &name),
    })))
}

fn modelfile(model: &str, parameters: &str) -> String {
    let lines = parameters.lines();
    let lines = lines.map(|line| format!("PARAMETER {line}\n"));
    format!("FROM {model}\n{}", lines.collect::<String>())
}

/// Returns the sampling defaults in a Modelfile's notation.
fn parameters(defaults: &GenerationDefaults) -> String {
    let lines = [
        defaults
            .temperature
            .map(|value| format!("temperature {value}")),
        defaults.top_k.map(|value| format!("top_k {value}")),
        defaults.top_p.map(|value| format!("top_p {value}")),
        defaults.min_p.map(|value| format!("min_p {value}")),
        defaults
            .repetition_penalty
            .map(|value| format!("repeat_penalty {value}")),
    ];
    let stop = defaults
        .stop
        .iter()
        .map(|text| format!("stop {}", json!(text)));
    let lines = lines.into_iter().flatten().chain(stop);
    lines.collect::<Vec<_>>().join("\n")
}
