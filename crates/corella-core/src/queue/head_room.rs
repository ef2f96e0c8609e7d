//! How long a request is expected to go on, and the pages that are kept for it until then.

use alloc::vec::Vec;

use crate::queue::page_forecast::PageDemand;
use crate::request_state::{RequestIndex, RequestState, Stage};
use crate::{HeadRoom, Scheduler};

/// After a preemption, the share covers this many more tokens for each running request.
const HORIZON: u32 = 20;
/// A request that was preempted should not be preempted again, so its output is expected to be as
/// long as nine in ten outputs are at most. The quantile is given in units of 1/2^32.
const RETURNING_QUANTILE: u32 = (1 << 31) / 10 * 18;

impl HeadRoom {
    /// The share in the first step; 0 for rules without a share.
    pub(crate) fn first_share(&self) -> u32 {
        match *self {
            Self::Share { share, .. } => share,
            Self::Estimate | Self::Limit => 0,
        }
    }
}

impl Scheduler {
    /// Lowers the share after a step, so that more requests start the longer nothing is preempted.
    pub(crate) fn lower_share(&mut self) {
        if let HeadRoom::Share {
            share,
            min_share,
            num_decay_steps,
        } = self.config.head_room
            && num_decay_steps > 0
        {
            let floor = min_share.min(share);
            let decay = (share - floor).div_ceil(num_decay_steps).max(1);
            self.head_room_share = self.head_room_share.saturating_sub(decay).max(floor);
        }
    }

    /// Raises the share after a preemption, to the part of their limits that the running requests
    /// have used so far, and a little more.
    pub(crate) fn raise_share(&mut self) {
        let HeadRoom::Share {
            num_decay_steps: 1..,
            ..
        } = self.config.head_room
        else {
            return;
        };
        let (mut num_used, mut num_limit) = (0, 0);
        for &index in self.running.as_slice() {
            let state = &self.requests[index];
            num_used += u64::from((state.num_output_tokens() + HORIZON).min(state.max_tokens));
            num_limit += u64::from(state.max_tokens);
        }
        let one = u64::from(HeadRoom::ONE);
        let needed = (num_used * one).checked_div(num_limit).unwrap_or(0);
        self.head_room_share = self.head_room_share.max(needed as u32);
    }

    /// Sets the number of output tokens that a request is expected to end with. A running request
    /// keeps this number until it has as many.
    pub(crate) fn expect_output(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let num_drawn = state.num_total_tokens() - state.num_prompt_tokens;
        if state.stage != Stage::Waiting {
            if num_drawn < state.expected_output || state.expected_output == state.max_tokens {
                return;
            }
            state.next_quantile();
        }
        let quantile = match state.num_preemptions {
            0 => state.quantile,
            _ => state.quantile.max(RETURNING_QUANTILE),
        };
        let expected_output = self.output_at(&self.requests[index], quantile);
        let state = &mut self.requests[index];
        state.expected_output = expected_output;
    }

    /// The length at this quantile, in units of 1/2^32, of outputs that came as far as the request's, within its own
    /// limits.
    pub(crate) fn output_at(&self, state: &RequestState, quantile: u32) -> u32 {
        if state.is_length_known {
            return state.max_tokens;
        }
        let num_drawn = state.num_total_tokens() - state.num_prompt_tokens;
        let namespace = &state.request.namespace;
        let expected = self.output_lengths.expected(namespace, num_drawn, quantile);
        let min_tokens = state.request.stopping.min_tokens;
        expected.max(min_tokens).min(state.max_tokens)
    }

    /// What a request will want of the pool when it holds `num_held_pages` pages, the first
    /// `num_shared_pages` of which it found in the prefix tree.
    pub(crate) fn page_demand(
        &self,
        state: &RequestState,
        num_held_pages: u32,
        num_shared_pages: u32,
    ) -> PageDemand {
        let num_rows = state.num_rows();
        let num_final_rows = state.num_prompt_tokens + state.expected_output - 1;
        let num_final_pages = self.num_group_pages(state, num_final_rows);
        let num_full_pages = self.config.num_full_pages(num_final_rows);
        PageDemand {
            num_rows,
            num_steps: num_final_rows.saturating_sub(num_rows),
            num_held_pages,
            num_final_pages: num_final_pages.max(num_held_pages),
            num_window_pages: num_final_pages.saturating_sub(num_full_pages),
            num_shared_pages,
            num_kept_pages: self.num_kept_pages(state, num_held_pages),
            is_certain: state.is_length_known,
        }
    }

    /// The most pages of all groups that a request holds until it has `num_rows` rows. In groups with
    /// a window that may be while it prefills.
    fn num_group_pages(&self, state: &RequestState, num_rows: u32) -> u32 {
        let config = &self.config;
        let num_pages = config.num_pages_of(num_rows, config.max_inflight_steps);
        let num_prefill_pages = match state.stage == Stage::Waiting || state.is_prefilling() {
            true => config.num_pages_of(state.num_known_tokens(), state.num_rows_at_once),
            false => 0,
        };
        num_pages
            .max(num_prefill_pages)
            .min(config.num_unpinned_pages())
    }

    /// Pages beyond those that it holds which a rule that does not go by time keeps for a request.
    pub(crate) fn num_kept_pages(&self, state: &RequestState, num_held_pages: u32) -> u32 {
        let num_drawn = state.num_total_tokens() - state.num_prompt_tokens;
        let rest = state.max_tokens - num_drawn;
        let num_kept_rows = match self.config.head_room {
            HeadRoom::Estimate => return 0,
            HeadRoom::Limit => rest,
            HeadRoom::Share { .. } => {
                let rest = rest.saturating_sub(1);
                let share = u64::from(rest) * u64::from(self.head_room_share);
                let share = share.div_ceil(HeadRoom::ONE.into()) as u32;
                // A request that was preempted is given time to go on as long as it has before.
                let returning = match state.num_preemptions {
                    0 => 0,
                    _ => num_drawn.min(rest),
                };
                1 + share.max(returning)
            }
        };
        let num_rows = state.num_rows() + num_kept_rows;
        let num_pages = self.num_group_pages(state, num_rows);
        num_pages.saturating_sub(num_held_pages)
    }

    /// The demand of a running request. The pages that it found in the prefix tree count as shared.
    /// Others may also share pages that it has published itself; the forecast ignores that.
    pub(crate) fn demand_of_running(&self, state: &RequestState) -> PageDemand {
        let num_held_pages = state.tables.num_pages() as u32;
        self.page_demand(state, num_held_pages, state.num_shared_pages)
    }

    /// Counts a running request in the forecast, by what is expected of it.
    pub(crate) fn count_running(&mut self, index: RequestIndex) {
        let demand = self.demand_of_running(&self.requests[index]);
        let contribution = self.forecast.add(&demand);
        self.requests[index].contribution = Some(contribution);
    }

    /// Counts a running request by what is expected of it now instead of when it was last counted.
    pub(crate) fn recount_running(&mut self, index: RequestIndex) {
        self.stop_counting(index);
        self.expect_output(index);
        self.count_running(index);
    }

    /// Takes a request that stops running out of the forecast.
    pub(crate) fn stop_counting(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        if let Some(contribution) = state.contribution.take() {
            self.forecast
                .remove(&contribution, state.tables.num_pages());
        }
    }

    /// Adds up the pages that a rule which does not go by time keeps for the requests that are
    /// counted. They change with every token, so the sum is made whenever it is about to be used.
    pub(crate) fn keep_pages_of_running(&mut self) {
        self.recount_receipts();
        if self.config.head_room == HeadRoom::Estimate {
            return;
        }
        let running = self.running.iter();
        let counted = running.chain(self.receipts.iter());
        let counted = counted.map(|index| &self.requests[index]);
        let kept = counted.map(|state| self.num_kept_pages(state, state.tables.num_pages() as u32));
        let num_pages = kept.map(|num_pages| num_pages as usize).sum();
        self.forecast.keep_pages(num_pages);
    }

    /// Counts requests without a slot anew: the clock goes on, and they take no rows.
    pub(crate) fn recount_receipts(&mut self) {
        for index in self.receipts.iter().collect::<Vec<_>>() {
            self.recount_running(index);
        }
    }

    /// Tokens that were drawn elsewhere say how long outputs become, too.
    pub(crate) fn note_drawn_elsewhere(&mut self, index: RequestIndex) {
        let state = &self.requests[index];
        if state.is_length_known {
            return;
        }
        for len in 1..=state.num_output_tokens() {
            self.output_lengths
                .note_grown(&state.request.namespace, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{BatchOutput, Request, RequestId, Sample, SchedulerConfig};

    /// A request that has as many tokens as it was expected to end with, and goes on, is expected to
    /// get at least one more.
    #[test]
    fn what_was_expected_to_have_ended_gets_a_new_expectation() {
        let mut scheduler = Scheduler::new(SchedulerConfig::new(256, 4, 1024)).unwrap();
        let mut request = Request::greedy(RequestId(0), vec![1, 2, 3], 500);
        request.stopping.end_token_ids = vec![9];
        scheduler.add_requests(vec![request]).unwrap();
        let batch = scheduler.schedule(0).unwrap();
        let sample = Sample {
            token: 7,
            logprobs: None,
        };
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: vec![(batch.spans[0].slot, sample)],
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        let index = scheduler.requests.find(RequestId(0)).unwrap();
        scheduler.requests[index].expected_output = 1;
        scheduler.expect_output(index);
        assert!(scheduler.requests[index].expected_output > 1);
        // Before that time an expectation stays as it is.
        scheduler.requests[index].expected_output = 2;
        scheduler.expect_output(index);
        assert_eq!(scheduler.requests[index].expected_output, 2);
    }
}
