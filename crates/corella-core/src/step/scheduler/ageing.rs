//! Aged requests: waiting requests that were passed over in `max_passed_over` steps.
//!
//! The next turn belongs to an aged request. If it fits, it starts before all others. If it does not fit yet, it could
//! block the whole queue: under priority, urgent requests would wait until enough pages are free for a large aged one.
//! So others may start if they do not delay the aged request, as in batch systems (EASY backfilling; Lifka 1995). The
//! forecast determines, once, the step by which the running requests will have made room for the aged one. Before that
//! step, another request may start if it is expected to end in time, or fits beside the aged one. After that step, no
//! request starts before the aged one.

use crate::queue::aged_request::AgedRequest;
use crate::request_state::RequestIndex;
use crate::step::scheduler::admission::Candidate;
use crate::step::step_plan::StepPlan;
use crate::{Scheduler, StepId};

impl Scheduler {
    /// Starts aged requests, and returns the first that does not fit.
    pub(super) fn admit_aged(&mut self, plan: &mut StepPlan) -> Option<RequestIndex> {
        while let Some(index) = self.waiting.oldest_aged(&self.requests) {
            let was_aged = self.requests[index].is_aged();
            self.requests[index].set_aged(true);
            if self.try_start(index, plan).is_ok() {
                continue;
            }
            if self.requests[index].leader().is_none() {
                self.requests[index].set_aged(was_aged);
                return Some(index);
            }
        }
        None
    }

    /// Returns the aged request `index`, with the number of rows that another request can fill before the aged one
    /// should start.
    pub(super) fn aged_request(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Option<AgedRequest> {
        plan.round.aged = None;
        let candidate = self.candidate(index, plan).ok()?;
        let num_needed_pages = candidate.num_needed_pages();
        let num_available = self.kv.num_available();
        let num_turns = self.num_decode_turns();
        let now = plan.batch.step.0;
        let due = self.requests[index].due_step(|| {
            let forecast = self.forecast.pages();
            let num_rows = forecast.num_steps_until(num_needed_pages, num_available);
            StepId(now + u64::from(num_rows) * num_turns)
        });
        let num_rows_left = due.0.saturating_sub(now) / num_turns;
        Some(AgedRequest {
            index,
            num_needed_pages,
            num_rows_left: u32::try_from(num_rows_left).unwrap_or(u32::MAX),
        })
    }

    /// Whether starting the candidate now could prolong the aged request's wait.
    pub(super) fn would_delay_aged(&self, candidate: &Candidate, plan: &StepPlan) -> bool {
        let Some(aged) = plan.round.aged.filter(|aged| aged.index != candidate.index) else {
            return false;
        };
        if aged.num_rows_left == 0 {
            return true;
        }
        let num_prefill_steps = candidate
            .num_uncached_tokens
            .div_ceil(self.config.largest_chunk());
        if candidate.demand.num_steps + num_prefill_steps <= aged.num_rows_left {
            return false;
        }
        // From here on: the candidate would still run when the aged request should start.
        if self.running.num_free_slots() < 2 {
            return true;
        }
        let num_taken = self.forecast.pages().pages_after(aged.num_rows_left)
            + (candidate.num_needed_pages() + aged.num_needed_pages) as i64;
        num_taken > self.kv.num_available() as i64
    }

    /// The number of steps in which every running request gets to decode once.
    fn num_decode_turns(&self) -> u64 {
        let num_running = self.running.len() as u64;
        num_running
            .div_ceil(self.config.max_decode_seqs.into())
            .max(1)
    }

    /// Records that this step has passed over every waiting request whose ticket is earlier than the ticket of a
    /// request that starts.
    pub(super) fn note_passed_over(&mut self, plan: &StepPlan) {
        if !self.policy.overtakes {
            return;
        }
        if let Some(ticket) = plan.round.latest_ticket {
            self.waiting.note_started(ticket);
        }
    }
}
