//! Why a request of a prefill node goes to no decode node.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// The prompt is shorter than `--disaggregate-min-tokens`.
    Short,
    /// Sending its KV rows would take longer than computing the prompt.
    SlowLink,
    /// No decode node is there that has room.
    NoRoom,
    /// The client wants to be told of the prompt, and only this node computes it.
    PromptOutputs,
    /// No other node can hold the answer to its constraint.
    Constraint,
}

/// Requests that stayed, by reason, since the start.
#[derive(Debug, Default)]
pub struct StayCounts([AtomicU64; StayReason::ALL.len()]);

impl StayReason {
    pub const ALL: [Self; 5] = [
        Self::Short,
        Self::SlowLink,
        Self::NoRoom,
        Self::PromptOutputs,
        Self::Constraint,
    ];

    /// The value of a metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::SlowLink => "slow_link",
            Self::NoRoom => "no_room",
            Self::PromptOutputs => "prompt_outputs",
            Self::Constraint => "constraint",
        }
    }
}

impl StayCounts {
    /// Counts the choices of one request, and tells of them in the log.
    pub(super) fn note(&self, reason: StayReason, num_choices: u32, id: Option<&str>) {
        self.0[reason as usize].fetch_add(num_choices.into(), Ordering::Relaxed);
        let reason = reason.label();
        tracing::debug!(id, reason, "a request stays on this node");
    }

    pub fn get(&self, reason: StayReason) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}
