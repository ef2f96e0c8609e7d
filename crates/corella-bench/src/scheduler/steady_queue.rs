//! Every policy with a long queue that goes on, or stands for want of pages.

use corella_core::{HeadRoom, SchedulerConfig};

use super::calls::{CallLimits, Calls};
use super::queue_cost::QueueCost;
use super::traffic::{
    FCFS, LPM, NUM_PROMPT_TOKENS, PACK, PRIORITY, Policy, Traffic, request, sharing_request,
};

const PAGE_SIZE: u32 = 16;

pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    let mut rows = Vec::new();
    for policy in [FCFS, PACK, PRIORITY, LPM] {
        for page_size in [PAGE_SIZE, 1] {
            rows.extend(turnover(
                policy,
                page_size,
                num_running,
                num_waiting,
                limits,
            ));
        }
    }
    for policy in [FCFS, PACK, PRIORITY, LPM] {
        rows.push(no_pages(policy, num_running, num_waiting, limits));
    }
    rows.push(preemption_in_vain(num_running, num_waiting, limits));
    rows
}

/// In nearly every step one request ends, one starts and one arrives. Priorities, where they
/// count, are mixed, so that requests overtake others all the time and some have aged.
fn turnover(
    policy: Policy,
    page_size: u32,
    num_running: usize,
    num_waiting: usize,
    limits: CallLimits,
) -> [QueueCost; 2] {
    const FIRST_MAX_TOKENS: u64 = 64;
    let max_tokens = FIRST_MAX_TOKENS + num_running as u64;
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens as usize).div_ceil(page_size as usize) + 1;
    let config = policy.config(num_running, num_running * pages_each, page_size);
    let mut traffic = Traffic::new(config);
    let make = |id: u64| {
        let is_first = id < num_running as u64;
        let num_tokens = if is_first {
            FIRST_MAX_TOKENS + id
        } else {
            num_running as u64
        };
        let mut request = sharing_request(id, num_tokens as u32);
        request.priority = (id * 7 % 4) as i32;
        request
    };
    traffic.start(num_running, make);
    traffic.add(num_waiting, make);
    let (mut schedule, mut update) = (Calls::new(limits), Calls::new(limits));
    while schedule.go_on() {
        let num_ended = traffic.step(&mut schedule, &mut update);
        traffic.add(num_ended, make);
    }
    let row = |call, calls: Calls| QueueCost {
        case: format!("{}, turnover", policy.name),
        call,
        page_size,
        num_running,
        num_waiting,
        cost: calls.cost(),
    };
    [row("schedule", schedule), row("update", update)]
}

/// Slots are free, and pages are promised to those that run.
fn no_pages(
    policy: Policy,
    num_running: usize,
    num_waiting: usize,
    limits: CallLimits,
) -> QueueCost {
    let max_tokens = limits.num_calls + 64;
    let mut config = full_config(policy, num_running, max_tokens);
    config.max_num_seqs += 64;
    let mut traffic = Traffic::new(config);
    let make = |id: u64| request(id, NUM_PROMPT_TOKENS, max_tokens as u32);
    traffic.start(num_running, make);
    traffic.add(num_waiting, make);
    let (mut schedule, mut update) = (Calls::new(limits), Calls::new(limits));
    while schedule.go_on() {
        traffic.step(&mut schedule, &mut update);
    }
    QueueCost {
        case: format!("{}, no pages", policy.name),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }
}

/// The first that waits is more urgent than half of those that run, and too long for their place.
fn preemption_in_vain(num_running: usize, num_waiting: usize, limits: CallLimits) -> QueueCost {
    let max_tokens = limits.num_calls + 64;
    let mut config = full_config(PRIORITY, num_running, max_tokens);
    config.max_num_seqs += 64;
    let pool_len = (config.num_pages * config.page_size) as usize;
    let mut traffic = Traffic::new(config);
    traffic.start(num_running, |id| {
        let mut request = request(id, NUM_PROMPT_TOKENS, max_tokens as u32);
        request.priority = if id < num_running as u64 / 2 { -1 } else { 1 };
        request
    });
    traffic.add(1, |id| request(id, pool_len * 6 / 10, 1));
    traffic.add(num_waiting.saturating_sub(1), |id| {
        let mut request = request(id, NUM_PROMPT_TOKENS, max_tokens as u32);
        request.priority = 2;
        request
    });
    let (mut schedule, mut update) = (Calls::new(limits), Calls::new(limits));
    while schedule.go_on() {
        traffic.step(&mut schedule, &mut update);
    }
    QueueCost {
        case: "priority, preemption in vain".to_owned(),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }
}

/// A pool of what those that run come to need, and less beside it than a prompt.
fn full_config(policy: Policy, num_running: usize, max_tokens: usize) -> SchedulerConfig {
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens - 1).div_ceil(PAGE_SIZE as usize);
    let num_pages = num_running * pages_each + NUM_PROMPT_TOKENS / PAGE_SIZE as usize - 1;
    let mut config = policy.config(num_running, num_pages, PAGE_SIZE);
    config.head_room = HeadRoom::Limit;
    config
}
