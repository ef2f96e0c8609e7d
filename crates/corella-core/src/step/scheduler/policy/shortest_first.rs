//! Shortest job first: the mean wait is least if the request with the least work starts first (Smith 1956). Patience
//! bounds the wait of the others.

use crate::Scheduler;
use crate::step::step_plan::StepPlan;

/// The quantile that half of the outputs do not exceed, in units of 1/2^32.
const MEDIAN: u32 = 1 << 31;

impl Scheduler {
    /// Starts the requests with the least work left among the first `lookahead` new ones, until one does not fit. Aged
    /// requests go before them.
    pub(super) fn admit_shortest_first(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if self.admit_aged(plan).is_some() || !self.has_room_to_start(plan) {
            return;
        }
        let mut by_work = self.look_ahead(lookahead, plan);
        by_work.sort_by_cached_key(|&(index, num_cached_rows)| {
            let state = &self.requests[index];
            let num_tokens = state.num_prompt_tokens() + self.outlook.output_at(state, MEDIAN);
            num_tokens.saturating_sub(num_cached_rows)
        });
        self.admit_each(by_work.into_iter().map(|(index, _)| index), plan);
    }
}
