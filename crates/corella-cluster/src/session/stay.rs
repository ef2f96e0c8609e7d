//! Counts the requests that a prefill node sends to no decode node.

use std::sync::atomic::{AtomicU64, Ordering};

use corella_core::StayReason;

/// Number of requests that stayed since the start, by reason.
#[derive(Debug, Default)]
pub struct StayCounts([AtomicU64; StayReason::ALL.len()]);

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
