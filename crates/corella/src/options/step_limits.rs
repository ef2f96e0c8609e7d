//! The limits of a step that differ between devices.

use corella_core::SchedulerConfig;

/// The limits of a step that differ between a GPU and a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    pub max_num_batched_tokens: u32,
    pub max_prefill_tokens: u32,
    pub max_inflight_steps: u32,
}

impl StepLimits {
    pub fn of(limits: &SchedulerConfig) -> Self {
        Self {
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_prefill_tokens: limits.max_prefill_tokens,
            max_inflight_steps: limits.max_inflight_steps,
        }
    }

    pub fn set(self, limits: &mut SchedulerConfig) {
        limits.max_num_batched_tokens = self.max_num_batched_tokens;
        limits.max_prefill_tokens = self.max_prefill_tokens;
        limits.max_inflight_steps = self.max_inflight_steps;
    }
}
