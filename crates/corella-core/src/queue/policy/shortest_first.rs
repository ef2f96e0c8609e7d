//! Shortest job first: the mean wait is least if the request with the least work starts first (Smith 1956). Patience
//! bounds how long the others wait.

use crate::Scheduler;
use crate::request_state::RequestState;
use crate::step::step_plan::StepPlan;

/// Half of the outputs are no longer than this quantile, in units of 1/2^32.
const MEDIAN: u32 = 1 << 31;

impl Scheduler {
    /// Starts those of the first `lookahead` new requests that have the least work left, until one does not fit.
    /// Requests that have aged go before them.
    pub(super) fn admit_shortest_first(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if self.admit_aged(plan).is_some() || !self.has_room_to_start(plan) {
            return;
        }
        let mut by_work = self.look_ahead(lookahead, plan);
        for (index, num_rows) in &mut by_work {
            let state = &self.requests[*index];
            let num_uncached_tokens = state.num_known_tokens().saturating_sub(*num_rows);
            *num_rows = num_uncached_tokens.saturating_add(self.output_left(state));
        }
        by_work.sort_by_key(|&(_, num_tokens)| num_tokens);
        self.admit_each(by_work.into_iter().map(|(index, _)| index), plan);
    }

    /// How many tokens a waiting request is expected to draw.
    fn output_left(&self, state: &RequestState) -> u32 {
        let num_drawn = state.num_known_tokens() - state.num_prompt_tokens;
        let num_expected = match state.is_length_known {
            true => state.max_tokens,
            false => {
                let namespace = &state.request.namespace;
                let expected = self.output_lengths.expected(namespace, num_drawn, MEDIAN);
                { expected.max(state.request.stopping.min_tokens) }.min(state.max_tokens)
            }
        };
        num_expected.saturating_sub(num_drawn)
    }
}
