//! Transcripts of the whole server: a socket at one end, the mock executor at the other.

mod adapter;
mod best_of;
mod chat;
mod client;
mod completion;
mod field;
mod fixture;
mod kv_transfer;
mod lifecycle;
mod limit;
mod local_client;
mod messages;
mod metric;
mod prompt_logprobs;
mod rate_limit;
mod responses;
mod service;
mod speculation;
mod structured_output;
mod suffix;
mod token_id;
mod token_rule;
mod tools;
mod validation;
