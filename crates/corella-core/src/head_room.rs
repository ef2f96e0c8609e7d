//! How long a request is expected to go on, and the pages that are kept for it until then.

use alloc::boxed::Box;

use crate::page_forecast::{PageDemand, PageForecast};
use crate::request_state::{RequestIndex, RequestState, Stage};
use crate::step_plan::StepPlan;
use crate::{HeadRoom, Scheduler};

/// Tokens that every running request shall get before the next preemption.
const HORIZON: u32 = 20;
/// A request that was preempted once shall not be again: its output is expected to be as long as
/// that of nine in ten. A share in 1/2^32.
const RETURNING_QUANTILE: u32 = (1 << 31) / 10 * 18;

impl HeadRoom {
    /// What the share begins with; 0 where there is none.
    pub(crate) fn first_share(&self) -> u32 {
        match *self {
            Self::Share { share, .. } => share,
            Self::Estimate | Self::Limit => 0,
        }
    }
}

impl Scheduler {
    /// Steps without preemption make the scheduler bolder.
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

    /// After a preemption: the share of their limit that running requests have come to use, and
    /// a little more.
    pub(crate) fn raise_share(&mut self) {
        let HeadRoom::Share {
            num_decay_steps: 1..,
            ..
        } = self.config.head_room
        else {
            return;
        };
        let (mut num_used, mut num_limit) = (0, 0);
        for &index in &self.running {
            let state = &self.requests[index];
            num_used += u64::from((state.num_output_tokens() + HORIZON).min(state.max_tokens));
            num_limit += u64::from(state.max_tokens);
        }
        let one = u64::from(HeadRoom::ONE);
        let needed = (num_used * one).checked_div(num_limit).unwrap_or(0);
        self.head_room_share = self.head_room_share.max(needed as u32);
    }

    /// Settles how many output tokens a request is expected to end with. One that runs keeps to
    /// it until it is longer.
    pub(crate) fn expect_output(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let num_drawn = state.num_total_tokens() - state.num_prompt_tokens;
        if state.stage != Stage::Waiting {
            if num_drawn < state.expected_output || state.expected_output == state.max_tokens {
                return;
            }
            state.next_quantile();
        }
        state.expected_output = if state.is_length_known {
            state.max_tokens
        } else {
            let quantile = match state.num_preemptions {
                0 => state.quantile,
                _ => state.quantile.max(RETURNING_QUANTILE),
            };
            let namespace = &state.request.namespace;
            let expected = self.output_lengths.expected(namespace, num_drawn, quantile);
            let min_tokens = state.request.stopping.min_tokens;
            expected.max(min_tokens).min(state.max_tokens)
        };
        let num_rows = state.num_prompt_tokens + state.expected_output - 1;
        state.num_expected_pages = num_rows.div_ceil(self.config.page_size);
    }

    /// What a request will want of the pool behind the `table_len` pages that it has, of which it
    /// found `num_shared_pages` in the prefix tree.
    pub(crate) fn page_demand(
        &self,
        state: &RequestState,
        table_len: u32,
        num_shared_pages: u32,
    ) -> PageDemand {
        // The last token needs no row.
        let num_rows = state.num_total_tokens() - 1;
        let num_final_rows = state.num_prompt_tokens + state.expected_output - 1;
        let num_future_pages = state.num_expected_pages.saturating_sub(table_len);
        let num_kept_pages = match self.config.head_room {
            HeadRoom::Estimate => num_future_pages,
            HeadRoom::Limit | HeadRoom::Share { .. } => {
                let num_kept_rows = num_rows + self.num_kept_rows(state);
                let num_pages = num_kept_rows.div_ceil(self.config.page_size);
                num_pages.saturating_sub(table_len)
            }
        };
        PageDemand {
            num_steps: num_final_rows.saturating_sub(num_rows),
            num_free_rows: (table_len * self.config.page_size).saturating_sub(num_rows),
            num_future_pages: num_future_pages as usize,
            num_own_pages: (table_len - num_shared_pages) as usize,
            num_kept_pages: num_kept_pages as usize,
            is_certain: state.is_length_known,
        }
    }

    /// Rows beyond those of its tokens but the last that a rule keeps which does not go by time.
    fn num_kept_rows(&self, state: &RequestState) -> u32 {
        let num_drawn = state.num_total_tokens() - state.num_prompt_tokens;
        let rest = state.max_tokens - num_drawn;
        if self.config.head_room == HeadRoom::Limit {
            return rest;
        }
        let rest = rest.saturating_sub(1);
        let share = u64::from(rest) * u64::from(self.head_room_share);
        let share = share.div_ceil(HeadRoom::ONE.into()) as u32;
        // Whoever was preempted is given time to go on as long as it has before.
        let returning = match state.num_preemptions {
            0 => 0,
            _ => num_drawn.min(rest),
        };
        1 + share.max(returning)
    }

    /// The demand of a request that runs. What it found in the prefix tree others may use too; that
    /// they may use what it has published itself is left out of account.
    pub(crate) fn demand_of_running(&self, state: &RequestState) -> PageDemand {
        let table_len = state.table.len() as u32;
        self.page_demand(state, table_len, state.num_shared_pages)
    }

    /// Who is prefilling, and the pages that those who run will ask for.
    pub(crate) fn survey_running(&mut self, plan: &mut StepPlan) {
        plan.is_surveyed = true;
        plan.num_taken_pages = 0;
        plan.leaders.clear();
        let requests = &self.requests;
        let running = self.running.iter().copied();
        plan.leaders
            .extend(running.filter(|&index| requests[index].is_prefilling()));
        self.forecast_present(&mut plan.forecast);
    }

    /// Forecasts the pages of all that have some: who runs, and whose KV another node computes.
    pub(crate) fn forecast_present(&mut self, forecast: &mut PageForecast) {
        forecast.clear();
        for at in 0..self.running.len() {
            let index = self.running[at];
            self.expect_output(index);
            forecast.add(&self.demand_of_running(&self.requests[index]));
        }
        for index in self.receipts.iter() {
            forecast.add(&self.demand_of_running(&self.requests[index]));
        }
    }

    pub(crate) fn take_forecast(&mut self) -> Box<PageForecast> {
        self.unused_forecast.take().unwrap_or_else(|| {
            let is_timed = self.config.head_room == HeadRoom::Estimate;
            Box::new(PageForecast::new(self.config.page_size, is_timed))
        })
    }

    pub(crate) fn keep_forecast(&mut self, forecast: Box<PageForecast>) {
        self.unused_forecast = Some(forecast);
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
