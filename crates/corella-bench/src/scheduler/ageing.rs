//! Urgent newcomers pass patient requests until all of those age in one step.

use super::calls::{CallLimits, Calls};
use super::queue_cost::QueueCost;
use super::traffic::{NUM_PROMPT_TOKENS, PRIORITY, Traffic, request};

const PAGE_SIZE: u32 = 16;

/// In every step an urgent request ends and an urgent one arrives, which takes its slot.
pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    const FIRST_MAX_TOKENS: u64 = 64;
    const PATIENT: i32 = 1;
    let max_tokens = FIRST_MAX_TOKENS + num_running as u64;
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens as usize).div_ceil(PAGE_SIZE as usize) + 1;
    let config = PRIORITY.config(num_running, num_running * pages_each, PAGE_SIZE);
    let mut traffic = Traffic::new(config);
    let make = |id: u64| {
        let is_first = id < num_running as u64;
        let num_tokens = if is_first {
            FIRST_MAX_TOKENS + id
        } else {
            num_running as u64
        };
        request(id, NUM_PROMPT_TOKENS, num_tokens as u32)
    };
    traffic.start(num_running, make);
    // The first of them end now: nobody passes in a step in which nobody starts.
    for _ in 0..FIRST_MAX_TOKENS {
        let num_ended = traffic.unmeasured_step();
        traffic.add(num_ended, make);
    }
    traffic.add(num_waiting, |id| {
        let mut request = make(id);
        request.priority = PATIENT;
        request
    });
    let (mut schedule, mut update) = (Calls::new(limits), Calls::new(limits));
    while schedule.go_on() {
        let num_ended = traffic.step(&mut schedule, &mut update);
        traffic.add(num_ended, make);
    }
    vec![QueueCost {
        case: "priority, all age at once".to_owned(),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }]
}
