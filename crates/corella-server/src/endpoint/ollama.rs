//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and its clients' questions about
//! models.

mod answer;
mod chat;
mod conversation;
mod embed;
mod error;
mod generate;
mod keep_alive;
mod model;
mod options;
mod pull;

pub use chat::OllamaChat;
pub use embed::{embed, embeddings};
pub use error::{in_ollama_shape, with_ollama_error};
pub use generate::OllamaGenerate;
pub use keep_alive::{keep_alive, unloaded_answer};
pub use model::{running_models, show_model, tags, version};
pub use options::end_with_context;
pub use pull::pull_model;
