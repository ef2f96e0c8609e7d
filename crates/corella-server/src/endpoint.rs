//! The endpoints that compute something for a caller, or keep it.

pub mod batches;
pub mod chat_completions;
pub mod chat_reply;
pub mod choice_metrics;
pub mod classify;
pub mod completions;
pub mod embeddings;
pub mod files;
pub mod generating_endpoint;
pub mod llama_server;
pub mod messages;
pub mod ollama;
pub mod pooling_endpoint;
pub mod render;
pub mod reply_block;
pub mod responses;
pub mod score;
pub mod token_generate;
pub mod tokenization;
