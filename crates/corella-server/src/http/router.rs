//! Maps paths to handlers, and adds the layers of every request.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::admin::adapter_load::{load_adapter, unload_adapter};
use crate::admin::api_description::openapi;
use crate::admin::engine_stream::engine_events;
use crate::admin::health::{health, load, metrics, ready, version};
use crate::admin::model_list::{list_known_models, list_models, retrieve_model};
use crate::admin::model_load::{load_model, unload_model};
use crate::admin::page::{docs, page, page_asset};
use crate::admin::prefix_cache::reset_prefix_cache;
use crate::admin::role::{change_role, role};
use crate::admin::sleep::{is_sleeping, sleep, wake_up};
use crate::call::request_id::name_request;
use crate::endpoint::batches::{cancel_batch, create_batch, list_batches, retrieve_batch};
use crate::endpoint::chat_completions::Chat;
use crate::endpoint::classify::classify;
use crate::endpoint::completions::Completion;
use crate::endpoint::embeddings::{embeddings, pooling};
use crate::endpoint::files::{delete_file, file_content, list_files, retrieve_file, upload_file};
use crate::endpoint::generating_endpoint::serve_call;
use crate::endpoint::llama_server;
use crate::endpoint::messages::{Messages, count_tokens, in_anthropic_shape};
use crate::endpoint::ollama::{self, OllamaChat, OllamaGenerate};
use crate::endpoint::render::{render_chat, render_completion};
use crate::endpoint::responses::{Responses, delete_response, list_input_items, retrieve_response};
use crate::endpoint::score::{rerank, score};
use crate::endpoint::token_generate::TokenGenerate;
use crate::endpoint::tokenization::{detokenize, tokenize};
use crate::http::accounting::count_request;
use crate::http::auth::{KeyCheck, require_admin, require_api_key};
use crate::http::cors::allow_origins;
use crate::http::model_choice::{look_at_model, use_model};
use crate::http::request_head::check_head;
use crate::http::unread_body::read_rest;
use crate::model_set::driver::ModelSet;
use crate::state::server_parts::ServerParts;
use crate::wire::api_error::ApiError;
use crate::wire::nearest_route::{advice, methods};

pub fn router(models: ModelSet) -> Router {
    let root_path = models.parts().config.root_path.clone();
    let plain = plain_router(models.clone());
    match root_path.is_empty() {
        true => plain,
        false => Router::new()
            .nest(&root_path, plain.clone())
            // A nested route has no final slash.
            .route(&format!("{root_path}/"), get(page).with_state(models))
            .fallback_service(plain),
    }
}

/// Returns the router of all paths, without the root path.
fn plain_router(models: ModelSet) -> Router {
    let server = models.parts();
    let keys = KeyCheck {
        keys: server.api_keys.clone(),
        default_name: None,
    };
    let needs_key = from_fn_with_state(keys, require_api_key);
    let uses_model = from_fn_with_state(models.clone(), use_model);
    let protected = Router::new()
        .route(
            "/v1/responses/{id}",
            get(retrieve_response).delete(delete_response),
        )
        .route("/v1/responses/{id}/input_items", get(list_input_items))
        .route("/v1/files", get(list_files).post(upload_file))
        .route("/v1/files/{id}", get(retrieve_file).delete(delete_file))
        .route("/v1/files/{id}/content", get(file_content))
        .route("/v1/batches", get(list_batches).post(create_batch))
        .route("/v1/batches/{id}", get(retrieve_batch))
        .route("/v1/batches/{id}/cancel", post(cancel_batch))
        .route("/load", get(load))
        .route("/is_sleeping", get(is_sleeping))
        .route("/v1/models", get(list_models))
        .route("/models", get(list_models))
        // The page reads this every second, without lines in the log.
        .route("/page/models.json", get(list_known_models))
        .route("/v1/models/{*name}", get(retrieve_model))
        .merge(model_routes(&models))
        .merge(admin_routes(&models))
        .route_layer(needs_key.clone());
    let anthropic = Router::new()
        .route("/v1/messages", post(serve_call::<Messages>))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route_layer(uses_model.clone())
        .route_layer(needs_key.clone())
        .route_layer(from_fn(in_anthropic_shape));
    let ollama = Router::new()
        .route("/api/chat", post(serve_call::<OllamaChat>))
        .route("/api/generate", post(serve_call::<OllamaGenerate>))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route_layer(uses_model)
        .route("/api/show", post(ollama::show_model))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running_models))
        .route("/api/pull", post(ollama::pull_model))
        .route("/api/version", get(ollama::version))
        .route_layer(needs_key)
        .route_layer(from_fn(ollama::in_ollama_shape));
    Router::new()
        .route("/", get(page))
        .route("/docs", get(docs))
        .route("/page/{*file}", get(page_asset))
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/openapi.json", get(openapi))
        .merge(protected)
        .merge(anthropic)
        .merge(ollama)
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(server.config.clone(), allow_origins))
        .layer(from_fn(check_head))
        .layer(from_fn_with_state(server.clone(), count_request))
        .layer(from_fn(name_request))
        .layer(from_fn(read_rest))
        .with_state(models)
}

/// Returns the routes of requests to a model.
fn model_routes(models: &ModelSet) -> Router<ModelSet> {
    Router::new()
        .route("/v1/chat/completions", post(serve_call::<Chat>))
        .route("/v1/completions", post(serve_call::<Completion>))
        .route("/v1/chat/completions/render", post(render_chat))
        .route("/v1/completions/render", post(render_completion))
        .route("/inference/v1/generate", post(serve_call::<TokenGenerate>))
        .route("/v1/responses", post(serve_call::<Responses>))
        .route("/v1/embeddings", post(embeddings))
        .route("/score", post(score))
        .route("/v1/score", post(score))
        .route("/rerank", post(rerank))
        .route("/v1/rerank", post(rerank))
        .route("/v2/rerank", post(rerank))
        .route("/pooling", post(pooling))
        .route("/classify", post(classify))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .merge(llama_server_routes())
        .route_layer(from_fn_with_state(models.clone(), use_model))
        .merge(
            Router::new()
                .route("/engine/events", get(engine_events))
                .route("/props", get(llama_server::props))
                .route("/slots", get(llama_server::slots))
                .route_layer(from_fn_with_state(models.clone(), look_at_model)),
        )
}

/// Returns the routes that change the server.
fn admin_routes(models: &ModelSet) -> Router<ModelSet> {
    let of_role = Router::new()
        .route("/role", get(role).post(change_role))
        .route_layer(from_fn_with_state(models.clone(), look_at_model));
    Router::new()
        .route("/v1/load_lora_adapter", post(load_adapter))
        .route("/v1/unload_lora_adapter", post(unload_adapter))
        .route_layer(from_fn_with_state(models.clone(), use_model))
        .merge(of_role)
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/models/load", post(load_model))
        .route("/models/unload", post(unload_model))
        .route_layer(from_fn(require_admin))
}

/// llama-server's own paths, and OpenAI's without `/v1`.
fn llama_server_routes() -> Router<ModelSet> {
    Router::new()
        .route("/completion", post(serve_call::<llama_server::Completion>))
        .route("/completions", post(serve_call::<llama_server::Completion>))
        .route("/infill", post(serve_call::<llama_server::Infill>))
        .route("/embedding", post(llama_server::embedding))
        .route("/embeddings", post(llama_server::embedding))
        .route("/apply-template", post(llama_server::apply_template))
        .route("/chat/completions", post(serve_call::<Chat>))
        .route("/responses", post(serve_call::<Responses>))
        .route("/reranking", post(rerank))
        .route("/v1/reranking", post(rerank))
}

/// Returns the router of the endpoints that batches may use, without the layers that check a caller.
pub fn batch_router(models: ModelSet) -> Router {
    let server = models.parts().clone();
    Router::new()
        .route("/v1/chat/completions", post(serve_call::<Chat>))
        .route("/v1/completions", post(serve_call::<Completion>))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/responses", post(serve_call::<Responses>))
        .route_layer(from_fn_with_state(models.clone(), use_model))
        .layer(from_fn_with_state(server, count_request))
        .layer(from_fn(name_request))
        .with_state(models)
}

async fn unknown_path(State(server): State<Arc<ServerParts>>, request: Request) -> Response {
    let path = request.uri().path();
    let known = path.strip_prefix(&*server.config.root_path).unwrap_or(path);
    let advice = advice(request.method().as_str(), known);
    refusal(path, ApiError::unknown_path(path, &advice))
}

async fn wrong_method(State(server): State<Arc<ServerParts>>, request: Request) -> Response {
    let path = request.uri().path();
    let known = path.strip_prefix(&*server.config.root_path).unwrap_or(path);
    let error = ApiError::wrong_method(request.method().as_str(), path, &methods(known));
    refusal(path, error)
}

/// Ollama's clients also ask for unknown paths, and only read errors in Ollama's form.
fn refusal(path: &str, error: ApiError) -> Response {
    let response = error.into_response();
    match path.starts_with("/api/") {
        true => ollama::with_ollama_error(response),
        false => response,
    }
}
