//! Why a prefill node sends a request to no decode node.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// The prompt is shorter than `--disaggregate-min-tokens`.
    Short,
    /// Sending its KV rows would take longer than computing the prompt.
    SlowLink,
    /// No decode node has room.
    NoRoom,
    /// The client asks for outputs of the prompt, which only the node that computes it has.
    PromptOutputs,
    /// No other node can enforce its constraint.
    Constraint,
}

/// Number of requests that stayed since the start, by reason.
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

    /// Returns the value of the metric's label.
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
    /// Counts the choices of one request, and logs them.
    pub(super) fn note(&self, reason: StayReason, num_choices: u32, id: Option<&str>) {
        self.0[reason as usize].fetch_add(num_choices.into(), Ordering::Relaxed);
        let reason = reason.label();
        tracing::debug!(id, reason, "a request stays on this node");
    }

    pub fn get(&self, reason: StayReason) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}
