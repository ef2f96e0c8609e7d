//! Measures a queue in which urgent newcomers pass other requests, until all passed requests age in one step.

use super::calls::CallLimits;
use super::queue_cost::QueueCost;
use super::traffic::{PRIORITY, with_priority};
use super::turnover;

const PAGE_SIZE: u32 = 16;

/// In every step an urgent request ends, and a new urgent request arrives and takes its slot.
pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    const OTHERS: i32 = 1;
    let mut traffic = turnover::traffic(PRIORITY, PAGE_SIZE, num_running);
    let make = |id: u64| with_priority(id, turnover::max_tokens(id, num_running), 0);
    traffic.start(num_running, make);
    // A request is passed over only in a step in which another one starts, so the first requests must end now.
    for _ in 0..turnover::NUM_START_STEPS {
        let num_ended = traffic.unmeasured_step();
        traffic.add(num_ended, make);
    }
    traffic.add(num_waiting, |id| {
        with_priority(id, turnover::max_tokens(id, num_running), OTHERS)
    });
    let (schedule, _) = turnover::measure(&mut traffic, make, limits);
    vec![QueueCost {
        case: "priority, all age at once".to_owned(),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }]
}
