//! Measures a long queue under every policy, while requests start in each step or lack pages.

use corella_core::{HeadRoom, SchedulerConfig};

use super::calls::{CallLimits, Calls};
use super::queue_cost::QueueCost;
use super::traffic::{
    NUM_PROMPT_TOKENS, POLICIES, PRIORITY, Policy, Traffic, request, sharing_request, with_priority,
};
use super::turnover;

const PAGE_SIZE: u32 = 16;

pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    let mut rows = Vec::new();
    for policy in POLICIES {
        for page_size in [PAGE_SIZE, 1] {
            rows.extend(turnover_costs(
                policy,
                page_size,
                num_running,
                num_waiting,
                limits,
            ));
        }
    }
    for policy in POLICIES {
        rows.push(no_pages(policy, num_running, num_waiting, limits));
    }
    rows.push(preemption_in_vain(num_running, num_waiting, limits));
    rows
}

/// The queue moves: in nearly every step one request ends, one starts and one arrives. Under `priority` the priorities
/// are mixed, so that requests constantly overtake others, and some requests are aged.
fn turnover_costs(
    policy: Policy,
    page_size: u32,
    num_running: usize,
    num_waiting: usize,
    limits: CallLimits,
) -> [QueueCost; 2] {
    let mut traffic = turnover::traffic(policy, page_size, num_running);
    let make = |id: u64| sharing_request(id, turnover::max_tokens(id, num_running));
    traffic.start(num_running, make);
    traffic.add(num_waiting, make);
    let (schedule, update) = turnover::measure(&mut traffic, make, limits);
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

/// The queue stands still: slots are free, but all pages are reserved for running requests.
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
    let make = |id: u64| with_priority(id, max_tokens as u32, 0);
    traffic.start(num_running, make);
    traffic.add(num_waiting, make);
    let (schedule, _) = traffic.measure(limits, |_, _| {});
    QueueCost {
        case: format!("{}, no pages", policy.name),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }
}

/// The first waiting request is more urgent than half of the running requests, but needs more pages than preempting all
/// of them would free.
fn preemption_in_vain(num_running: usize, num_waiting: usize, limits: CallLimits) -> QueueCost {
    let max_tokens = limits.num_calls + 64;
    let mut config = full_config(PRIORITY, num_running, max_tokens);
    config.max_num_seqs += 64;
    let pool_len = (config.num_pages * config.page_size) as usize;
    let mut traffic = Traffic::new(config);
    traffic.start(num_running, |id| {
        let priority = if id < num_running as u64 / 2 { -1 } else { 1 };
        with_priority(id, max_tokens as u32, priority)
    });
    traffic.add(1, |id| request(id, pool_len * 6 / 10, 1));
    traffic.add(num_waiting.saturating_sub(1), |id| {
        with_priority(id, max_tokens as u32, 2)
    });
    let (schedule, _) = traffic.measure(limits, |_, _| {});
    QueueCost {
        case: "priority, preemption in vain".to_owned(),
        call: "schedule",
        page_size: PAGE_SIZE,
        num_running,
        num_waiting,
        cost: schedule.cost(),
    }
}

/// Returns a configuration with all pages that the running requests will ever need, and one page too few for another
/// prompt.
fn full_config(policy: Policy, num_running: usize, max_tokens: usize) -> SchedulerConfig {
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens - 1).div_ceil(PAGE_SIZE as usize);
    let num_pages = num_running * pages_each + NUM_PROMPT_TOKENS / PAGE_SIZE as usize - 1;
    let mut config = policy.config(num_running, num_pages, PAGE_SIZE);
    config.head_room = HeadRoom::Limit;
    config
}
