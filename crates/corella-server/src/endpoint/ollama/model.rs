//! Facts about models and the server for Ollama's clients.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_text::{ChatTemplate, FillInMiddle};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::answer::timestamp;
use super::options::served_model;
use crate::call::call_context::CallContext;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;

/// The version of Ollama's API. Clients ask for it before they use newer features.
const OLLAMA_VERSION: &str = "0.13.0";
/// Models are never unloaded, but clients expect a date.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Returns the entry of a model in a list. `size` is the size of the weights in memory if `is_running`, else the size
/// of the files.
fn model(state: &ServerState, name: &str, is_running: bool) -> Value {
    let facts = &state.config.model_facts;
    // Clients show the digest's first digits, and tell models apart by the digest.
    let digest = Sha256::digest(name.as_bytes()).into_iter();
    let mut model = json!({
        "name": name,
        "model": name,
        "modified_at": modified_at(state, name),
        "size": facts.file_bytes,
        "digest": digest.map(|byte| format!("{byte:02x}")).collect::<String>(),
        "details": details(state, name),
    });
    if is_running {
        model["size"] = json!(facts.weight_bytes);
        model["expires_at"] = json!(NEVER);
        model["size_vram"] = json!(facts.gpu_weight_bytes);
        model["context_length"] = json!(state.config.max_model_len);
    }
    model
}

fn modified_at(state: &ServerState, name: &str) -> String {
    let created_s = match state.served.adapters.get(name) {
        Some(adapter) => adapter.created,
        None => state.started_unix_s,
    };
    timestamp(UNIX_EPOCH + Duration::from_secs(created_s))
}

fn details(state: &ServerState, name: &str) -> Value {
    let facts = &state.config.model_facts;
    let parent = state
        .served
        .adapters
        .get(name)
        .map(|_| state.config.model_name());
    let family = Some(&facts.family).filter(|family| !family.is_empty());
    json!({
        // The model that an adapter changes.
        "parent_model": parent.unwrap_or_default(),
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

/// Returns the names that a caller may use: the model's names and its adapters.
fn names(state: &ServerState, context: &CallContext) -> Vec<String> {
    let adapters = state.served.adapters.list();
    let adapters = adapters.iter().map(|(name, _)| name.to_string());
    state
        .config
        .served_model_names
        .iter()
        .cloned()
        .chain(adapters)
        .filter(|name| context.check_model(&state.config, name).is_ok())
        .collect()
}

/// `/api/tags`: lists the model under each of its names, those of Ollama's library included, and its adapters.
pub async fn tags(State(state): State<Arc<ServerState>>, context: CallContext) -> Response {
    // Before a request, programs look in this list for the name that they will send.
    let others = state
        .config
        .other_names
        .iter()
        .filter(|name| context.check_model(&state.config, name).is_ok())
        .cloned();
    let models = names(&state, &context).into_iter().chain(others);
    let models = models.map(|name| model(&state, &name, false));
    json_response(&json!({"models": Vec::from_iter(models)}))
}

/// `/api/ps`: lists the model and its adapters, without `other_names`. All stay loaded as long as the server runs.
pub async fn running_models(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
) -> Response {
    let models = names(&state, &context).into_iter();
    let models = models.map(|name| model(&state, &name, true));
    json_response(&json!({"models": Vec::from_iter(models)}))
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

/// `/api/show`: a model's abilities, its template in Jinja, and its default parameters of sampling. The Modelfile has no
/// template, because Ollama's are in another language.
pub async fn show_model(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let body = state.bodies.read(body).await?;
    let fields: ShowFields = body.parse()?;
    body.check_fields(state.served.field_check(Endpoint::OllamaShow))?;
    let model = fields.model.or(fields.name);
    let model = served_model(&state.served, model.as_deref())?;
    context.check_model(&state.config, &model)?;
    let facts = &state.config.model_facts;
    let family = match facts.family.as_str() {
        "" => "decoder",
        family => family,
    };
    let parameters = parameters(&state);
    let template = state.served.chat_template.as_ref();
    Ok(json_response(&json!({
        "modelfile": modelfile(&model, &parameters),
        "parameters": parameters,
        "template": template.map(ChatTemplate::source).unwrap_or_default(),
        "details": details(&state, &model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.num_parameters,
            format!("{family}.context_length"): state.config.max_model_len,
            format!("{family}.embedding_length"): state.config.vector_len(),
            format!("{family}.vocab_size"): state.config.vocab_size,
        },
        "capabilities": capabilities(&state),
        "modified_at": modified_at(&state, &model),
    })))
}

fn modelfile(model: &str, parameters: &str) -> String {
    let lines = parameters.lines();
    let lines = lines.map(|line| format!("PARAMETER {line}\n"));
    format!("FROM {model}\n{}", lines.collect::<String>())
}

/// Returns the sampling defaults in a Modelfile's notation.
fn parameters(state: &ServerState) -> String {
    let defaults = &state.config.generation_defaults;
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

fn capabilities(state: &ServerState) -> Vec<&'static str> {
    let template = state.served.chat_template.as_ref();
    let format = state.served.reply_format;
    let reads_tools = template.is_some_and(ChatTemplate::reads_tools);
    if !state.config.has_head {
        return vec!["embedding"];
    }
    let mut capabilities = vec!["completion"];
    for (name, is_there) in [
        ("tools", reads_tools && format.calls.is_some()),
        ("thinking", format.reasoning.is_some()),
        (
            "insert",
            FillInMiddle::of(&state.served.tokenizer).is_some(),
        ),
    ] {
        if is_there {
            capabilities.push(name);
        }
    }
    capabilities
}
