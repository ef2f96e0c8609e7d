//! How much of the output still to come is reserved when a request starts.

use crate::request_state::RequestState;
use crate::{Scheduler, SchedulerConfig};

/// Tokens that every running request shall get before the next preemption.
const HORIZON: u32 = 20;

impl SchedulerConfig {
    fn floor_ratio(&self) -> u32 {
        self.min_new_token_ratio.min(self.new_token_ratio)
    }

    /// What the ratio loses in a step.
    fn ratio_decay(&self) -> u32 {
        let is_fixed = self.new_token_ratio == Self::RATIO_ONE;
        let span = self.new_token_ratio - self.floor_ratio();
        match self.new_token_ratio_decay_steps {
            num_steps if num_steps > 0 && !is_fixed => span.div_ceil(num_steps).max(1),
            _ => 0,
        }
    }
}

impl Scheduler {
    /// Steps without preemption make the scheduler bolder.
    pub(crate) fn lower_new_token_ratio(&mut self) {
        let lowered = self
            .new_token_ratio
            .saturating_sub(self.config.ratio_decay());
        self.new_token_ratio = lowered.max(self.config.floor_ratio());
    }

    /// After a preemption: the share of their limit that running requests have come to use, and
    /// a little more.
    pub(crate) fn raise_new_token_ratio(&mut self) {
        if self.config.new_token_ratio_decay_steps == 0 {
            return;
        }
        let (mut num_used, mut num_limit) = (0, 0);
        for &index in &self.running {
            let state = &self.requests[index];
            num_used += u64::from((state.num_output_tokens() + HORIZON).min(state.max_tokens));
            num_limit += u64::from(state.max_tokens);
        }
        let one = u64::from(SchedulerConfig::RATIO_ONE);
        let needed = (num_used * one).checked_div(num_limit).unwrap_or(0);
        self.new_token_ratio = self.new_token_ratio.max(needed as u32);
    }

    /// Pages for the tokens of a request and its share of the output still to come.
    pub(crate) fn num_pages_at_share(&self, state: &RequestState) -> usize {
        let num_rows = state.num_total_tokens();
        let rest = u64::from(state.num_final_rows().saturating_sub(num_rows));
        // Whoever was preempted once comes back for good.
        let ratio = match state.num_preemptions {
            0 => self.new_token_ratio,
            _ => SchedulerConfig::RATIO_ONE,
        };
        let share = (rest * u64::from(ratio)).div_ceil(SchedulerConfig::RATIO_ONE.into());
        (num_rows + share as u32).div_ceil(self.config.page_size) as usize
    }

    /// Pages that a running request will ask for.
    pub(crate) fn num_future_pages(&self, state: &RequestState) -> usize {
        self.num_pages_at_share(state)
            .saturating_sub(state.table.len())
    }
}
