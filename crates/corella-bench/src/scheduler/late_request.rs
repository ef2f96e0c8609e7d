//! Measures waiting requests whose long prompts are cached. Without the cache, they would miss their TTFT objective.

use corella_core::{LatencyObjectives, Request, RequestId, TokenId};

use super::calls::CallLimits;
use super::queue_cost::QueueCost;
use super::traffic::{NUM_PROMPT_TOKENS, PRIORITY, Traffic, request};

const NUM_CACHED_TOKENS: usize = 8192;

pub(super) fn costs(num_running: usize, num_late: usize, limits: CallLimits) -> Vec<QueueCost> {
    let row = |page_size| cost(page_size, num_running, num_late, limits);
    [16, 1].map(row).into()
}

/// While prompts are computed, a step takes one second, so an uncached prompt is expected to take about one second.
/// While the late requests wait, a step takes 1 µs. Their TTFT objective is half a second.
fn cost(page_size: u32, num_running: usize, num_late: usize, limits: CallLimits) -> QueueCost {
    const PREFILL_STEP_US: u64 = 1_000_000;
    const STEP_US: u64 = 1;
    const TTFT_US: u64 = 500_000;
    let max_tokens = limits.num_calls + 64;
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens).div_ceil(page_size as usize) + 1;
    let num_pages = num_running * pages_each + 2 * (NUM_CACHED_TOKENS / page_size as usize + 1);
    let mut config = PRIORITY.config(num_running, num_pages, page_size);
    config.enable_slo_admission = true;
    let mut traffic = Traffic::new(config);
    traffic.step_us = PREFILL_STEP_US;
    let long = |id: u64| {
        // Tokens are counted down, because the running requests have the low ones.
        let shared = (0..NUM_CACHED_TOKENS as TokenId).map(|token| TokenId::MAX - token);
        let prompt = shared.chain([id as TokenId]).collect();
        Request::greedy(RequestId(id), prompt, 1)
    };
    traffic.start(1, long);
    while traffic.scheduler.has_unfinished() {
        traffic.unmeasured_step();
    }
    traffic.start(num_running, |id| {
        request(id, NUM_PROMPT_TOKENS, max_tokens as u32)
    });
    traffic.step_us = STEP_US;
    traffic.add(num_late, |id| {
        let mut request = long(id);
        request.objectives = LatencyObjectives {
            ttft_us: Some(TTFT_US),
            tpot_us: None,
        };
        request
    });
    let (schedule, _) = traffic.measure(limits, |_, _| {});
    let stats = traffic.scheduler.stats();
    assert_eq!(
        (stats.num_waiting, stats.num_missed_objectives),
        (num_late, 0)
    );
    QueueCost {
        case: "objectives, 8,192 cached tokens".to_owned(),
        call: "schedule",
        page_size,
        num_running,
        num_waiting: num_late,
        cost: schedule.cost(),
    }
}
