//! Runs all measurements with very many waiting requests.

use std::time::Duration;

use super::calls::CallLimits;
use super::queue_cost::QueueCost;
use super::{ageing, late_request, queue_change, steady_queue, undrawn_step};

#[derive(Debug, Clone)]
pub struct QueueBenchOptions {
    /// The number of running requests.
    pub num_running: usize,
    /// Numbers of waiting requests. Each gives several rows.
    pub num_waiting: Vec<usize>,
    /// The number of waiting requests with a latency objective and a long cached prompt.
    pub num_late: usize,
    pub limits: CallLimits,
}

impl Default for QueueBenchOptions {
    fn default() -> Self {
        Self {
            num_running: 1024,
            num_waiting: vec![10_000, 100_000],
            num_late: 4000,
            limits: CallLimits {
                num_calls: 2000,
                max_time: Duration::from_secs(3),
                num_allocations: None,
            },
        }
    }
}

/// Measures all cases, with a row for each kind of call.
pub fn run(options: &QueueBenchOptions) -> Vec<QueueCost> {
    let &QueueBenchOptions {
        num_running,
        num_late,
        limits,
        ..
    } = options;
    let mut rows = Vec::new();
    for &num_waiting in &options.num_waiting {
        rows.extend(steady_queue::costs(num_running, num_waiting, limits));
        rows.extend(ageing::costs(num_running, num_waiting, limits));
        rows.extend(undrawn_step::costs(num_running, num_waiting, limits));
        rows.extend(queue_change::costs(num_waiting, limits));
    }
    if num_late > 0 {
        rows.extend(late_request::costs(num_running, num_late, limits));
    }
    rows
}
