//! The expected lengths of requests, and the pages that are kept for them until their ends.
//!
//! A waiting request starts when the forecast has room for it at every later step. If the forecast was too low, the
//! running request that comes last in rank is preempted.

use crate::cache::page_forecast::{PageDemand, PageForecast};
use crate::queue::output_length::OutputLengths;
use crate::request_state::{Phase, RequestState};
use crate::{FinishReason, HeadRoom, SchedulerConfig};

/// After a preemption, the share covers this number of further tokens for each running request.
const HORIZON: u32 = 20;
/// A request that was preempted should not be preempted again, so its output is expected to have the length that nine
/// in ten outputs do not exceed. The quantile is given in units of 1/2^32.
const RETURNING_QUANTILE: u32 = (1 << 31) / 10 * 18;

/// Forecasts the lengths of outputs and the pages for them, over running requests and requests whose KV another node or
/// host memory fills.
#[derive(Debug)]
pub(crate) struct LengthForecast {
    config: SchedulerConfig,
    lengths: OutputLengths,
    forecast: PageForecast,
    /// The current share of [`HeadRoom::Share`], in 1/65536; 0 for rules without a share.
    share: u32,
}

impl LengthForecast {
    pub fn new(config: &SchedulerConfig) -> Self {
        let is_timed = config.head_room == HeadRoom::Estimate;
        let num_growing_groups = config.num_groups_without_window();
        Self {
            lengths: OutputLengths::new(),
            forecast: PageForecast::new(config.page_size, num_growing_groups, is_timed),
            share: match config.head_room {
                HeadRoom::Share { share, .. } => share,
                HeadRoom::Estimate | HeadRoom::Limit => 0,
            },
            config: config.clone(),
        }
    }

    pub fn pages(&self) -> &PageForecast {
        &self.forecast
    }

    pub fn pages_mut(&mut self) -> &mut PageForecast {
        &mut self.forecast
    }

    pub fn share(&self) -> u32 {
        self.share
    }

    /// Lowers the share after a step. The longer no request is preempted, the more requests start.
    pub fn lower_share(&mut self) {
        if let HeadRoom::Share {
            share,
            min_share,
            num_decay_steps,
        } = self.config.head_room
            && num_decay_steps > 0
        {
            let floor = min_share.min(share);
            let decay = (share - floor).div_ceil(num_decay_steps).max(1);
            self.share = self.share.saturating_sub(decay).max(floor);
        }
    }

    /// Raises the share after a preemption, to the part of their limits that the `running` requests have used so
    /// far, and a little more.
    pub fn raise_share<'a>(&mut self, running: impl Iterator<Item = &'a RequestState>) {
        let HeadRoom::Share {
            num_decay_steps: 1..,
            ..
        } = self.config.head_room
        else {
            return;
        };
        let (mut num_used, mut num_limit) = (0, 0);
        for state in running {
            num_used += u64::from((state.num_output_tokens() + HORIZON).min(state.max_tokens()));
            num_limit += u64::from(state.max_tokens());
        }
        let one = u64::from(HeadRoom::ONE);
        let needed = (num_used * one).checked_div(num_limit).unwrap_or(0);
        self.share = self.share.max(needed as u32);
    }

    /// Sets the expected number of output tokens of a request. A running request keeps this number until it is reached.
    pub fn expect_output(&self, state: &mut RequestState) {
        let num_drawn = state.num_drawn_tokens();
        if state.phase() != Phase::Waiting {
            if num_drawn < state.expected_output() || state.expected_output() == state.max_tokens()
            {
                return;
            }
            state.next_quantile();
        }
        let quantile = match state.num_preemptions() {
            0 => state.quantile(),
            _ => state.quantile().max(RETURNING_QUANTILE),
        };
        state.expect_output(self.output_at(state, quantile));
    }

    /// The output length at `quantile`, in units of 1/2^32, among outputs at least as long as the request's output so
    /// far. The request's own limits bound the result.
    pub fn output_at(&self, state: &RequestState, quantile: u32) -> u32 {
        let request = state.request();
        self.lengths.expected_within(
            &request.namespace,
            &request.stopping,
            state.num_drawn_tokens(),
            state.max_tokens(),
            quantile,
        )
    }

    /// The page demand of a request that holds `num_held_pages` pages. The request found the first `num_shared_pages`
    /// of them in the prefix tree.
    pub fn page_demand(
        &self,
        state: &RequestState,
        num_held_pages: u32,
        num_shared_pages: u32,
    ) -> PageDemand {
        let num_rows = state.num_rows();
        let num_final_rows = state.num_prompt_tokens() + state.expected_output() - 1;
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
            is_certain: state.is_length_known(),
        }
    }

    /// The largest number of pages, in all groups, that a request holds until it has `num_rows` rows. In groups with a
    /// window, the peak may be during prefill.
    fn num_group_pages(&self, state: &RequestState, num_rows: u32) -> u32 {
        let config = &self.config;
        let num_pages = config.num_pages_of(num_rows, config.max_inflight_steps);
        let prefills = match state.phase() {
            Phase::Receiving => false,
            Phase::Waiting => true,
            _ => state.is_prefilling(),
        };
        let num_prefill_pages = match prefills {
            true => config.num_pages_of(state.num_known_tokens(), state.num_rows_at_once()),
            false => 0,
        };
        num_pages
            .max(num_prefill_pages)
            .min(config.num_unpinned_pages())
    }

    /// Pages that `HeadRoom::Limit` or `HeadRoom::Share` keeps for a request, beyond the pages that it holds.
    pub fn num_kept_pages(&self, state: &RequestState, num_held_pages: u32) -> u32 {
        let num_drawn = state.num_drawn_tokens();
        let rest = state.max_tokens() - num_drawn;
        let num_kept_rows = match self.config.head_room {
            HeadRoom::Estimate => return 0,
            HeadRoom::Limit => rest,
            HeadRoom::Share { .. } => {
                let rest = rest.saturating_sub(1);
                let share = u64::from(rest) * u64::from(self.share);
                let share = share.div_ceil(HeadRoom::ONE.into()) as u32;
                // A preempted request gets pages for the same number of further tokens as it had drawn before.
                let returning = match state.num_preemptions() {
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

    /// The demand of a running request. The pages that it found in the prefix tree count as shared. Other requests may
    /// also share pages that it has published itself; the forecast ignores that.
    pub fn demand_of_running(&self, state: &RequestState) -> PageDemand {
        let num_held_pages = state.tables().num_pages() as u32;
        self.page_demand(state, num_held_pages, state.num_shared_pages())
    }

    /// Counts a running request in the forecast, by its expectation.
    pub fn count(&mut self, state: &mut RequestState) {
        let demand = self.demand_of_running(state);
        state.set_contribution(self.forecast.add(&demand));
    }

    /// Counts a running request anew, by its present expectation.
    pub fn recount(&mut self, state: &mut RequestState) {
        self.stop_counting(state);
        self.expect_output(state);
        self.count(state);
    }

    /// Removes a request that stops running from the forecast.
    pub fn stop_counting(&mut self, state: &mut RequestState) {
        if let Some(contribution) = state.take_contribution() {
            self.forecast
                .remove(&contribution, state.tables().num_pages());
        }
    }

    pub fn note_taken(&mut self, state: &RequestState, num_pages: usize) {
        self.forecast.note_taken(num_pages, state.is_length_known());
    }

    pub fn note_given_back(&mut self, state: &RequestState, num_pages: usize) {
        self.forecast
            .note_given_back(num_pages, state.is_length_known());
    }

    /// Adds up the pages that `HeadRoom::Limit` or `HeadRoom::Share` keeps for the `counted` requests. These pages
    /// change with every token, so the sum is made before each use.
    pub fn keep_pages<'a>(&mut self, counted: impl Iterator<Item = &'a RequestState>) {
        if self.config.head_room == HeadRoom::Estimate {
            return;
        }
        let kept =
            counted.map(|state| self.num_kept_pages(state, state.tables().num_pages() as u32));
        let num_pages = kept.map(|num_pages| num_pages as usize).sum();
        self.forecast.keep_pages(num_pages);
    }

    pub fn note_grown(&mut self, state: &RequestState) {
        if !state.is_length_known() {
            let namespace = &state.request().namespace;
            self.lengths
                .note_grown(namespace, state.num_output_tokens());
        }
    }

    /// Records the length of an output that another node drew. It counts for the prediction, too.
    pub fn note_drawn_elsewhere(&mut self, state: &RequestState) {
        if state.is_length_known() {
            return;
        }
        for len in 1..=state.num_output_tokens() {
            self.lengths.note_grown(&state.request().namespace, len);
        }
    }

    pub fn note_ended(&mut self, state: &RequestState, reason: &FinishReason) {
        let request = state.request();
        let num_tokens = state.num_output_tokens();
        self.lengths
            .note_finished(&request.namespace, &request.stopping, num_tokens, reason);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::request_state::Rank;
    use crate::{Request, RequestId};

    fn config(head_room: HeadRoom) -> SchedulerConfig {
        let mut config = SchedulerConfig::new(256, 4, 1024);
        config.head_room = head_room;
        config
    }

    /// A request of three tokens that ends with an end token, or after 500 tokens.
    fn state(end_token_ids: Vec<u32>) -> RequestState {
        let mut request = Request::greedy(RequestId(0), vec![1, 2, 3], 500);
        request.stopping.end_token_ids = end_token_ids;
        let mut state = RequestState::new(request, Rank::FIRST, 500, &config(HeadRoom::Estimate));
        state.enter(Phase::Running);
        state
    }

    /// A request that has reached its expected length, and has not ended, is expected to end at the next quantile. The
    /// second quantile is 0.618. Before any output has ended, 512 lengths are equally likely, so the new expectation is
    /// 316 tokens.
    #[test]
    fn what_was_expected_to_have_ended_gets_a_new_expectation() {
        let forecast = LengthForecast::new(&config(HeadRoom::Estimate));
        let mut state = state(vec![9]);
        state.push_token(7);
        state.expect_output(1);
        forecast.expect_output(&mut state);
        assert!((308..=324).contains(&state.expected_output()));
        // Before that time an expectation is unchanged.
        state.expect_output(2);
        forecast.expect_output(&mut state);
        assert_eq!(state.expected_output(), 2);
    }

    #[test]
    fn a_share_falls_with_steps_and_rises_to_what_was_used() {
        let mut forecast = LengthForecast::new(&config(HeadRoom::Share {
            share: 1000,
            min_share: 900,
            num_decay_steps: 4,
        }));
        let shares: Vec<_> = (0..5)
            .map(|_| {
                forecast.lower_share();
                forecast.share()
            })
            .collect();
        assert_eq!(shares, [975, 950, 925, 900, 900]);
        // Five tokens of 500 are drawn, and the horizon has twenty more.
        let mut state = state(vec![]);
        for token in 0..5 {
            state.push_token(token);
        }
        forecast.raise_share([&state].into_iter());
        assert_eq!(forecast.share(), HeadRoom::ONE / 20);
    }

    /// The subtracted numbers are the added ones, even if the expectation has changed.
    #[test]
    fn a_request_leaves_nothing_in_the_forecast() {
        let mut forecast = LengthForecast::new(&config(HeadRoom::Estimate));
        let mut state = state(vec![9]);
        forecast.recount(&mut state);
        assert!(forecast.pages().peak() > 0);
        state.expect_output(400);
        forecast.stop_counting(&mut state);
        forecast.pages().check_invariants([].into_iter());
    }
}
