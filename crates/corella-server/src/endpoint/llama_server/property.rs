//! `/props` and `/slots`: facts about the server for llama-server's clients.

use axum::http::Uri;
use axum::response::Response;
use corella_text::ChatTemplate;
use serde_json::{Value, json};

use crate::model_set::model_use::UsedModel;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;

pub async fn props(UsedModel(state): UsedModel) -> Response {
    let config = &state.config;
    let template = state.served.chat_template.as_ref();
    let special = template.map(ChatTemplate::special_tokens);
    json_response(&json!({
        "default_generation_settings": {
            "n_ctx": config.max_model_len,
            "params": default_params(&state),
        },
        "total_slots": state.engine.limits().max_num_seqs,
        "model_alias": config.model_name(),
        "model_path": config.model_name(),
        "modalities": {"vision": false, "audio": false},
        "endpoint_slots": true,
        "endpoint_props": false,
        "endpoint_metrics": true,
        "chat_template": template.map(ChatTemplate::source).unwrap_or_default(),
        "bos_token": special.and_then(|tokens| tokens.bos_token.as_deref()).unwrap_or_default(),
        "eos_token": special.and_then(|tokens| tokens.eos_token.as_deref()).unwrap_or_default(),
        "build_info": format!("corella {}", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    }))
}

/// Returns the sampling defaults of a request.
fn default_params(state: &ServerState) -> Value {
    let defaults = &state.config.generation_defaults;
    json!({
        "temperature": defaults.temperature.unwrap_or(1.0),
        "top_k": defaults.top_k.unwrap_or(0),
        "top_p": defaults.top_p.unwrap_or(1.0),
        "min_p": defaults.min_p.unwrap_or(0.0),
        "repeat_penalty": defaults.repetition_penalty.unwrap_or(1.0),
        "repeat_last_n": -1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n_predict": -1,
        "stop": defaults.stop,
        "seed": state.config.seed.map_or(json!(-1), |seed| json!(seed)),
        "stream": false,
    })
}

/// A slot is the place of a running request. No slot has a share of the context, so each may use all of it.
pub async fn slots(UsedModel(state): UsedModel, uri: Uri) -> Result<Response, ApiError> {
    let num_slots = state.engine.limits().max_num_seqs as usize;
    let num_running = state.engine.stats().scheduler.num_running;
    let must_have_one = uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.strip_prefix("fail_on_no_slot="))
        .any(|value| !matches!(value, "" | "0" | "false"));
    if must_have_one && num_running >= num_slots {
        return Err(ApiError::no_slot(num_slots));
    }
    let slots: Vec<_> = (0..num_slots)
        .map(|slot| {
            json!({
                "id": slot,
                "n_ctx": state.config.max_model_len,
                "is_processing": slot < num_running,
            })
        })
        .collect();
    Ok(json_response(&slots))
}
