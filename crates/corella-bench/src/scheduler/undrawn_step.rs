//! Measures steps in which no token can be drawn, because all logits are NaN.

use corella_core::BatchOutput;

use super::calls::{CallLimits, Calls};
use super::queue_cost::QueueCost;
use super::traffic::{NUM_PROMPT_TOKENS, PRIORITY, Traffic, with_priority};

pub(super) fn costs(num_running: usize, num_waiting: usize, limits: CallLimits) -> Vec<QueueCost> {
    let row = |page_size| cost(page_size, num_running, num_waiting, limits);
    [16, 1].map(row).into()
}

/// In each round urgent requests take all slots and end in the step that computes their prompts. All other requests
/// wait throughout.
fn cost(page_size: u32, num_running: usize, num_waiting: usize, limits: CallLimits) -> QueueCost {
    const MAX_TOKENS: u32 = 16;
    let pages_each = (NUM_PROMPT_TOKENS + MAX_TOKENS as usize).div_ceil(page_size as usize) + 1;
    let mut config = PRIORITY.config(num_running, num_running * pages_each, page_size);
    config.max_num_batched_tokens = (num_running * NUM_PROMPT_TOKENS) as u32;
    config.max_prefill_tokens = config.max_num_batched_tokens;
    config.max_passed_over = 1 << 16;
    let mut traffic = Traffic::new(config);
    let urgent = |id: u64| with_priority(id, MAX_TOKENS, 0);
    traffic.add(num_waiting, |id| with_priority(id, MAX_TOKENS, 1));
    let mut update = Calls::new(limits);
    while update.go_on() {
        traffic.add(num_running, urgent);
        let batch = traffic
            .scheduler
            .schedule(0)
            .expect("no step was planned although requests run");
        assert_eq!(batch.spans.len(), num_running);
        let undrawn = batch.spans.iter().map(|span| (span.slot, "NaN".into()));
        let output = BatchOutput {
            step: batch.step,
            undrawn: undrawn.collect(),
            ..BatchOutput::default()
        };
        update.time(|| traffic.scheduler.update_from_output(&output));
        assert_eq!(traffic.num_ended(), num_running);
    }
    QueueCost {
        case: "all rows without a draw".to_owned(),
        call: "update",
        page_size,
        num_running,
        num_waiting,
        cost: update.cost(),
    }
}
