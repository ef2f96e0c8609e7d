//! How long a request is expected to go on, and the pages that are kept for it until then.

use crate::page_forecast::PageDemand;
use crate::request_state::{RequestIndex, RequestState};
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
        if state.is_length_known() {
            state.expected_output = state.max_tokens;
            return;
        }
        if state.is_running() {
            if num_drawn < state.expected_output {
                return;
            }
            state.next_quantile();
        }
        let quantile = match state.num_preemptions {
            0 => state.quantile,
            _ => state.quantile.max(RETURNING_QUANTILE),
        };
        let namespace = &state.request.namespace;
        let expected = self.output_lengths.expected(namespace, num_drawn, quantile);
        let min_tokens = state.request.stopping.min_tokens;
        state.expected_output = expected.max(min_tokens).min(state.max_tokens);
    }

    /// What a request will want of the pool behind the `table_len` pages that it has, of which it
    /// alone holds `num_own_pages`.
    pub(crate) fn page_demand(
        &self,
        state: &RequestState,
        table_len: usize,
        num_own_pages: usize,
    ) -> PageDemand {
        let page_size = self.config.page_size;
        // The last token needs no row.
        let num_rows = state.num_total_tokens() - 1;
        let rest = |output: u32| (state.num_prompt_tokens + output - 1).saturating_sub(num_rows);
        let num_pages = |num_more_rows: u32| {
            let num_all = (num_rows + num_more_rows).div_ceil(page_size) as usize;
            num_all.saturating_sub(table_len)
        };
        let num_steps = rest(state.expected_output);
        let num_kept_rows = match self.config.head_room {
            HeadRoom::Estimate => num_steps,
            HeadRoom::Limit => rest(state.max_tokens),
            HeadRoom::Share { .. } => {
                let rest = rest(state.max_tokens).saturating_sub(1);
                let share = u64::from(rest) * u64::from(self.head_room_share);
                let share = share.div_ceil(HeadRoom::ONE.into()) as u32;
                // Whoever was preempted is given time to go on as long as it has before.
                let num_drawn = num_rows + 1 - state.num_prompt_tokens;
                let returning = if state.num_preemptions > 0 {
                    num_drawn
                } else {
                    0
                };
                1 + share.max(returning.min(rest))
            }
        };
        PageDemand {
            num_steps,
            num_free_rows: (table_len as u32 * page_size).saturating_sub(num_rows),
            num_future_pages: num_pages(num_steps),
            num_own_pages,
            num_kept_pages: num_pages(num_kept_rows),
            is_certain: state.is_length_known(),
        }
    }

    /// The demand of a request that runs.
    pub(crate) fn demand_of_running(&self, state: &RequestState) -> PageDemand {
        self.page_demand(state, state.table.len(), self.num_own_pages(state))
    }

    /// Pages that the end of a request gives back. What others lock too is a beginning of its
    /// table: who locks a page of a path has locked all before it.
    fn num_own_pages(&self, state: &RequestState) -> usize {
        let is_shared = |page| self.kv.num_locks(page) > 1;
        match state.table.first() {
            Some(&first) if is_shared(first) => {
                state.table.len() - state.table.partition_point(|&page| is_shared(page))
            }
            _ => state.table.len(),
        }
    }

    /// Who is prefilling, and the pages that those who run will ask for.
    pub(crate) fn survey_running(&mut self, plan: &mut StepPlan) {
        plan.leaders.clear();
        plan.forecast.clear();
        for at in 0..self.running.len() {
            let index = self.running[at];
            self.expect_output(index);
            let state = &self.requests[index];
            if state.is_prefilling() {
                plan.leaders.push(index);
            }
            plan.forecast.add(&self.demand_of_running(state));
        }
    }
}
