//! The properties of policies that checkers expect. They follow from the documented policies, not from the scheduler's
//! code.

use corella_core::{PrefillAdmissionPolicy, SchedulerConfig, SchedulingPolicy};

/// Whether each request starts before all later arrivals.
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
