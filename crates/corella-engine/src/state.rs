//! The state and counts that callers and the loop share, and the watchdog over its steps.

pub(crate) mod engine_error;
pub(crate) mod engine_stats;
pub(crate) mod output_meter;
pub(crate) mod shared;
pub(crate) mod step_tokens;
pub(crate) mod stream_event;
pub(crate) mod watchdog;
