//! Measures a queue in which urgent newcomers pass other requests, until all of those age in one step.

use super::calls::CallLimits;
use super::queue_cost::QueueCost;
use super::traffic::{NUM_PROMPT_TOKENS, PRIORITY, request};
use super::turnover;

const PAGE_SIZE: u32 = 16;

/// In every step an urgent request ends, and an urgent one arrives and takes its slot.
pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    const OTHERS: i32 = 1;
    let mut traffic = turnover::traffic(PRIORITY, PAGE_SIZE, num_running);
    let make = |id: u64| request(id, NUM_PROMPT_TOKENS, turnover::max_tokens(id, num_running));
    traffic.start(num_running, make);
    // Requests are passed over only in steps in which one starts, so the first ones must end now.
    for _ in 0..turnover::NUM_START_STEPS {
        let num_ended = traffic.unmeasured_step();
        traffic.add(num_ended, make);
    }
    traffic.add(num_waiting, |id| {
        let mut request = make(id);
        request.priority = OTHERS;
        request
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
