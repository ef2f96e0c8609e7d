//! Measures requests that join the queue, and requests that leave it without having run.

use corella_core::RequestId;

use super::calls::{CallLimits, Calls};
use super::queue_cost::QueueCost;
use super::traffic::{FCFS, PRIORITY, Policy, Traffic, mixed_priority, with_priority};
use crate::sample::split_mix::split_mix;

const PAGE_SIZE: u32 = 16;

pub(super) fn costs(num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    let rows = |policy| cost(policy, num_waiting, limits);
    [FCFS, PRIORITY].map(rows).into_iter().flatten().collect()
}

/// In each round a request of some priority arrives, and a random waiting one is aborted.
fn cost(policy: Policy, num_waiting: usize, limits: CallLimits) -> [QueueCost; 2] {
    let mut traffic = Traffic::new(policy.config(1, 1024, PAGE_SIZE));
    let make = |id: u64| with_priority(id, 1, mixed_priority(id));
    traffic.add(num_waiting, make);
    let mut waiting: Vec<RequestId> = (0..num_waiting as u64).map(RequestId).collect();
    let mut state = 0;
    let (mut add, mut abort) = (Calls::new(limits), Calls::new(limits));
    while add.go_on() {
        let request = make(waiting.len() as u64 + add.num_calls() as u64);
        waiting.push(request.id);
        let requests = vec![request];
        let added = add.time(|| traffic.scheduler.add_requests(requests));
        added.expect("the queue refuses a request although it has no limit");
        let at = split_mix(&mut state) % waiting.len() as u64;
        let id = waiting.swap_remove(at as usize);
        assert!(abort.time(|| traffic.scheduler.abort_request(id)));
        assert_eq!(traffic.num_ended(), 1);
    }
    let row = |call, calls: Calls| QueueCost {
        case: format!("{}, one more and one less", policy.name),
        call,
        page_size: PAGE_SIZE,
        num_running: 0,
        num_waiting,
        cost: calls.cost(),
    };
    [row("add", add), row("abort", abort)]
}
