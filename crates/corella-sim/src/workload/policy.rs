//! What checkers may expect of a policy. The scheduler has answers of its own; these are told by what the policies promise.

use corella_core::{PrefillAdmissionPolicy, SchedulerConfig, SchedulingPolicy};

/// Whether a request starts before all that arrive after it.
pub fn starts_in_order(config: &SchedulerConfig) -> bool {
    config.prefill_admission_policy == PrefillAdmissionPolicy::Fifo && ranks_by_arrival(config)
}

/// Whether requests are ranked by arrival, though packing may start some before others.
pub fn ranks_by_arrival(config: &SchedulerConfig) -> bool {
    config.scheduling_policy == SchedulingPolicy::Fcfs
}

/// Whether the most urgent request goes first, and may take the place of others.
pub fn is_by_priority(config: &SchedulerConfig) -> bool {
    config.scheduling_policy == SchedulingPolicy::Priority
}
