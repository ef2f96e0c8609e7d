//! The HTTP front end, which speaks OpenAI's API, Anthropic's, Ollama's and llama-server's.
//!
//! A request passes `router`, then `chat_completions`, `completions`, `responses`, `messages`, `ollama` or
//! `llama_server` (which parse, check and tokenise it on a thread of `text_thread`), then `generation` (which reads the
//! engine's token streams as text), and leaves as events of `sse` or as one JSON object. `embeddings` and `score` need
//! vectors instead of text, which `pooled_call` computes.

mod accounting;
mod adapter;
mod api_error;
mod api_key;
mod auth;
mod batch_file;
mod batch_line;
mod batches;
mod body_memory;
mod call;
mod call_message;
mod caller_grammars;
mod chat_call;
mod chat_completions;
mod chat_message;
mod chat_reply;
mod chat_role;
mod chat_tool;
mod chat_turn;
mod choice_metrics;
mod classify;
mod cluster_status;
mod completions;
mod cors;
mod embeddings;
mod engine_event;
mod engine_feed;
mod files;
mod first_token;
mod generation;
mod grammar_constraint;
mod health;
mod kv_events;
mod kv_transfer;
mod list_page;
mod listener;
mod llama_server;
mod loading;
mod local_client;
mod messages;
mod metrics;
mod model_list;
mod ollama;
mod output_format;
mod page;
mod pooled_call;
mod prefix_cache;
mod prompt;
mod rate_limit;
mod recent_latency;
mod reply_block;
mod reply_constraint;
mod request_body;
mod request_head;
mod request_id;
mod request_line;
mod request_trace;
mod response_store;
mod responses;
mod role;
mod router;
mod sampling_fields;
mod score;
mod scored_prompt;
mod serve;
mod serve_config;
mod server_state;
mod shutdown;
mod sse;
mod suffix;
mod text_thread;
mod thinking_switch;
mod tls;
mod token_logprob;
mod token_rule;
mod tokenization;
mod tool_fields;
mod unread_body;
mod wire;
mod write_deadline;

/// Files of requests and answers, shared by `corella batch` and `/v1/batches`.
pub mod batch {
    pub use crate::batch_file::{BatchFileError, Lines, Output, check_input};
    pub use crate::batch_line::{RequestLine, ResultError, ResultResponse, result_line};
    pub use crate::batches::Batches;
    pub use crate::files::FilesConfig;
}

/// The reader of ZeroMQ peers.
pub mod zmtp {
    pub use crate::kv_events::zmtp::{
        Frame, FrameBuffer, ZmtpError, check_greeting, command, socket_type,
    };
}

pub use adapter::AdapterLoader;
pub use api_key::{ApiKey, Clock, KeyDigest};
pub use cluster_status::{ClusterStatus, MAX_NODES, NodeStatus};
pub use cors::AllowedOrigins;
pub use grammar_constraint::GrammarMaker;
pub use kv_events::{KvEvents, KvEventsConfig};
pub use kv_transfer::{KvTransfer, KvTransferCall, KvTransferError};
pub use listener::Listener;
pub use loading::Loading;
pub use local_client::{LocalClient, LocalResponse};
pub use metrics::OutputMetrics;
pub use role::{BlockSite, RoleChange, RoleControl, RoleError, RoleStatus};
pub use router::router;
pub use serve::{DrainReport, serve};
pub use serve_config::{GenerationDefaults, ModelFacts, ServeConfig, TextModel};
pub use server_state::{Backend, ServerState};
pub use shutdown::{Shutdown, ShutdownSender, shutdown_signal};
pub use tls::{ServerTls, TlsError};
