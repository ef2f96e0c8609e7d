//! Traffic with turnover: in nearly every step one request ends, another starts in its slot, and
//! one more arrives.

use corella_core::Request;

use super::calls::{CallLimits, Calls};
use super::traffic::{NUM_PROMPT_TOKENS, Policy, Traffic};

/// The number of steps before the first request ends, in which all requests start.
pub(super) const NUM_START_STEPS: u64 = 64;

/// A scheduler with slots and pages for `num_running` requests of this traffic.
pub(super) fn traffic(policy: Policy, page_size: u32, num_running: usize) -> Traffic {
    let max_tokens = NUM_START_STEPS as usize + num_running;
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens).div_ceil(page_size as usize) + 1;
    Traffic::new(policy.config(num_running, num_running * pages_each, page_size))
}

/// The output length of a request. The first requests have different lengths, so that they end one by one. All later
/// requests have the same length.
pub(super) fn max_tokens(id: u64, num_running: usize) -> u32 {
    let num_running = num_running as u64;
    let max_tokens = match id < num_running {
        true => NUM_START_STEPS + id,
        false => num_running,
    };
    max_tokens as u32
}

/// Times the calls of steps. After each step, as many requests arrive as have ended. Returns the times of planning and
/// of processing the output.
pub(super) fn measure(
    traffic: &mut Traffic,
    make: impl Fn(u64) -> Request,
    limits: CallLimits,
) -> (Calls, Calls) {
    traffic.measure(limits, |traffic, num_ended| traffic.add(num_ended, &make))
}
