//! Longest prefix first, as in SGLang: a request starts before its cached prefix is evicted.

use core::cmp::Reverse;

use crate::Scheduler;
use crate::step::step_plan::StepPlan;

impl Scheduler {
    /// Starts the requests with the longest prefixes in the tree among the first `lookahead` new
    /// ones, until one does not fit. Aged requests go before them.
    pub(super) fn admit_longest_prefix(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if self.admit_aged(plan).is_some() || !self.has_room_to_start(plan) {
            return;
        }
        let mut by_prefix = self.look_ahead(lookahead, plan);
        by_prefix.sort_by_key(|&(_, num_cached_rows)| Reverse(num_cached_rows));
        self.admit_each(by_prefix.into_iter().map(|(index, _)| index), plan);
    }
}
