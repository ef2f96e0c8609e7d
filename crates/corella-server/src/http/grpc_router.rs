//! Maps the methods of the gRPC port to handlers, and adds the layers of every call.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::post;
use tokio::sync::Semaphore;

use crate::call::request_id::name_request;
use crate::grpc::grpc_shape::{in_grpc_shape, unknown_method};
use crate::grpc::health::{CHECK, MAX_WATCHES, WATCH, check, watch};
use crate::grpc::read_deadline::cut_off_unread;
use crate::grpc::vllm::generate::{GENERATE, GENERATE_STREAM, generate, generate_stream};
use crate::http::accounting::count_request;
use crate::http::auth::{KeyCheck, require_api_key};
use crate::model_set::driver::ModelSet;
use crate::wire::request_body::SentBody;

pub fn grpc_router(models: ModelSet) -> Router {
    let server = models.parts();
    let watches = Arc::new(Semaphore::new(MAX_WATCHES));
    let watch =
        move |State(models): State<ModelSet>, body: SentBody| watch(models, body, watches.clone());
    let keys = KeyCheck {
        keys: server.api_keys.clone(),
        default_name: server.config.grpc_key.clone(),
    };
    let protected = Router::new()
        .route(GENERATE, post(generate))
        .route(GENERATE_STREAM, post(generate_stream))
        .route_layer(from_fn_with_state(keys, require_api_key));
    Router::new()
        .merge(protected)
        .route(CHECK, post(check))
        .route(WATCH, post(watch))
        .fallback(unknown_method)
        .layer(from_fn(in_grpc_shape))
        .layer(from_fn_with_state(server.clone(), count_request))
        .layer(from_fn(name_request))
        .layer(from_fn_with_state(server.clone(), cut_off_unread))
        .with_state(models)
}
