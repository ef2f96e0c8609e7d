//! The first few new requests with their cached rows, for policies that choose among them.

use alloc::vec::Vec;

use crate::Scheduler;
use crate::request_state::RequestIndex;
use crate::step::scheduler::admission::Held;
use crate::step::step_plan::StepPlan;

/// The most tokens that one step compares with the prefix tree. Requests beyond that keep the lengths that earlier steps
/// found.
const MAX_COMPARED_TOKENS: usize = 1 << 16;

impl Scheduler {
    /// The first `lookahead` new requests in the order of the queue, with the number of cached rows of each.
    pub(super) fn look_ahead(
        &mut self,
        lookahead: u32,
        plan: &StepPlan,
    ) -> Vec<(RequestIndex, u32)> {
        let window = self.waiting.new_ones().take(lookahead as usize);
        let mut found_rows: Vec<_> = window.map(|index| (index, 0)).collect();
        if !self.config.enable_prefix_caching {
            return found_rows;
        }
        let page_size = self.config.page_size as usize;
        let mut num_compared = 0;
        for (index, num_rows) in &mut found_rows {
            let num_known = self.requests[*index].num_found_blocks() * page_size;
            if num_compared >= MAX_COMPARED_TOKENS {
                *num_rows = num_known as u32;
                continue;
            }
            let found = self.find_waiting(*index, plan.batch.step);
            let num_whole = found.path.len() * page_size;
            num_compared += page_size + num_whole.saturating_sub(num_known);
            *num_rows = found.num_rows(self.config.page_size);
        }
        found_rows
    }

    /// Starts requests in this order, until one does not fit.
    pub(super) fn admit_each(
        &mut self,
        order: impl Iterator<Item = RequestIndex>,
        plan: &mut StepPlan,
    ) {
        for index in order {
            if self.try_start(index, plan) == Err(Held::NoRoom) {
                return;
            }
        }
    }
}
