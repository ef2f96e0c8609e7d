//! The computation of a call: its caller and their limits, its generation as text, and its metrics.

pub mod account;
pub mod cached_prompt;
pub mod call_context;
pub mod call_engine;
pub mod generation;
pub mod kv_transfer;
pub mod metrics;
pub mod pooled_call;
pub mod prompt_memory;
pub mod prompt_watch;
pub mod rate_limit;
pub mod recent_latency;
pub mod request_id;
pub mod request_line;
pub mod request_trace;
pub mod response_head;
pub mod sse;
