//! The HTTP front end, which speaks OpenAI's API, Anthropic's, Ollama's and llama-server's.
//!
//! A request passes `http/router.rs`, then an endpoint, such as `endpoint/chat_completions.rs`, which has it parsed,
//! checked and tokenised on a thread of `text/text_thread.rs`. `call/generation.rs` reads the engine's token streams as
//! text, which leaves as events of `call/sse.rs` or as one JSON object. For embeddings and scores,
//! `call/pooled_call.rs` computes hidden states instead of text. A call of gRPC passes `http/grpc_router.rs` and a service in
//! `grpc` instead, and is the same call from there on.
//!
//! The rooms of the crate, from bottom to top. A room uses only rooms that this list names before it:
//!
//! * `clock`: the time of day, and seeds.
//! * `config`: the configuration of the server.
//! * `wire`: the bodies and fields of requests, errors, and the description of the API.
//! * `adapter`: the served adapters.
//! * `kv_events`: tells routers which blocks the prefix cache holds.
//! * `text`: requests as tokens and parameters.
//! * `call`: the computation of a call, its caller, and its metrics.
//! * `store`: responses, files and batches that are kept for callers.
//! * `state`: the state that handlers share.
//! * `model_set`: the models of the server, which are loaded by use.
//! * `endpoint`: endpoints that compute or keep something for a caller.
//! * `admin`: endpoints about the server itself.
//! * `grpc`: the services of the gRPC port.
//! * `http`: routes, and the layers of every request.
//! * `local_client`: calls within the process.
//! * `batch_run`: answers the requests of batches.
//! * `serve`: connections, from the start of the server to its end.

mod adapter;
mod admin;
mod batch_run;
mod call;
mod clock;
mod config;
mod endpoint;
mod grpc;
mod http;
mod kv_events;
mod local_client;
mod model_set;
mod serve;
mod state;
mod store;
mod text;
mod wire;

/// Files of requests and answers, shared by `corella batch` and `/v1/batches`.
pub mod batch {
    pub use crate::store::batch_file::{BatchFileError, Lines, Output, check_input};
    pub use crate::store::batch_line::{RequestLine, ResultError, ResultResponse, result_line};
    pub use crate::store::batch_table::Batches;
    pub use crate::store::file_store::FilesConfig;
}

/// Reads what ZeroMQ peers send.
pub mod zmtp {
    pub use crate::kv_events::zmtp::{
        Frame, FrameBuffer, ZmtpError, check_greeting, command, socket_type,
    };
}

pub use adapter::served_adapter::AdapterLoader;
pub use call::kv_transfer::{KvTransfer, KvTransferCall, KvTransferError};
pub use call::metrics::OutputMetrics;
pub use config::allowed_origins::AllowedOrigins;
pub use config::api_key::{ApiKey, Clock, KeyDigest};
pub use config::keep_alive::KeepAlive;
pub use config::serve_config::{ModelFacts, ServeConfig, TextModel};
pub use config::server_config::ServerConfig;
pub use config::tls::{ServerTls, TlsError};
pub use http::router::router;
pub use kv_events::{KvEvents, KvEventsConfig};
pub use local_client::{LocalClient, LocalResponse};
pub use model_set::driver::{ModelSet, ModelSetConfig};
pub use model_set::model_loader::{ModelId, ModelLoader, ModelMemory};
pub use model_set::model_table::ModelSetting;
pub use serve::listener::Listener;
pub use serve::loading::Loading;
pub use serve::shutdown::{Shutdown, ShutdownSender, shutdown_signal};
pub use serve::{DrainReport, MAX_GRPC_CONNECTIONS, serve};
pub use state::cluster_status::{ClusterStatus, MAX_NODES, NodeStatus};
pub use state::role_control::{BlockSite, RoleChange, RoleControl, RoleError, RoleStatus};
pub use state::server_parts::ServerParts;
pub use state::server_state::{Backend, ServerState};
pub use text::grammar_constraint::GrammarMaker;
