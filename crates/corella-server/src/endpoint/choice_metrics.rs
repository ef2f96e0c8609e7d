//! `choices[].metrics`: when a choice reached each stage.

use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;

use crate::call::generation::ChoiceDelta;

/// Times in seconds since 1970, with the names of vLLM's `RequestOutput.metrics`.
#[derive(Serialize)]
pub struct ChoiceMetrics {
    arrival_time: f64,
    queued_ts: f64,
    /// The start of the prompt's computation.
    scheduled_ts: f64,
    first_token_ts: f64,
    last_token_ts: f64,
    /// From the arrival to the first token.
    first_token_latency: f64,
    num_generation_tokens: u64,
}

impl ChoiceMetrics {
    /// Returns the times of a choice that ends with this delta, or `None` if the choice has no token.
    pub fn of(delta: &ChoiceDelta) -> Option<Self> {
        let times = delta.times?;
        let arrival = times.arrival_time.duration_since(UNIX_EPOCH).ok()?;
        let since_1970 = |after: Duration| (arrival + after).as_secs_f64();
        let scheduled = times.first_token.saturating_sub(times.prefill);
        Some(Self {
            arrival_time: since_1970(Duration::ZERO),
            queued_ts: since_1970(scheduled.saturating_sub(times.queue)),
            scheduled_ts: since_1970(scheduled),
            first_token_ts: since_1970(times.first_token),
            last_token_ts: since_1970(times.first_token + times.decode),
            first_token_latency: times.first_token.as_secs_f64(),
            num_generation_tokens: delta.usage.completion_tokens,
        })
    }
}
