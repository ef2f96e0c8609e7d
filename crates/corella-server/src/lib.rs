//! OpenAI-compatible HTTP front end.
//!
//! A request passes `router` → `chat_completions` or `completions` (fields to parameters and
//! tokens, on a thread of `text_thread`) → `generation` (the engine's token streams as text) → `sse` or
//! one JSON object.

mod accounting;
mod api_error;
mod auth;
mod call;
mod chat_completions;
mod chat_message;
mod completions;
mod field_check;
mod field_table;
mod generation;
mod health;
mod metrics;
mod model_list;
mod prefix_cache;
mod prompt;
mod request_body;
mod request_id;
mod router;
mod sampling_fields;
mod serve;
mod serve_config;
mod server_state;
mod shutdown;
mod sse;
mod text_thread;
mod token_logprob;
mod tokenization;

pub use router::router;
pub use serve::{DrainReport, serve};
pub use serve_config::{GenerationDefaults, ServeConfig, TextModel};
pub use server_state::ServerState;
pub use shutdown::{Shutdown, ShutdownSender, shutdown_signal};
