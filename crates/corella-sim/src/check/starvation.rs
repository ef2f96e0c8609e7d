//! Checks that no request starves, running or waiting.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{Request, RequestId, RequestOutput, SchedulerConfig};

use crate::check::verdict::{Checker, Planned, Verdict, ensure};
use crate::workload::policy;
use crate::workload::{Answer, Workload};

/// Rules 8 and 9: a decoding request is in every step, or takes turns with others if more than `max_decode_seqs`
/// requests decode. A waiting request is passed over a limited number of times.
pub struct NoStarvation {
    config: SchedulerConfig,
    longest_prompt: usize,
    requests: BTreeMap<RequestId, Waiting>,
}

struct Waiting {
    rank: (u64, RequestId),
    /// The number of requests that were queued after this one but go before it, because they arrived earlier.
    num_put_before: usize,
    num_prompt_tokens: u32,
    num_told_tokens: u32,
    /// The number of known tokens when the request last started. Steps up to this token are prefill, even if they
    /// recompute output from before a preemption.
    num_start_tokens: u32,
    num_final_rows: u32,
    is_new: bool,
    is_running: bool,
    /// The number of rows planned so far.
    num_rows: u32,
    /// The number of consecutive steps that should have computed the request and did not.
    num_missed_steps: usize,
    /// The number of such steps that is allowed: the largest bound that held during one of them.
    max_missed_steps: usize,
    /// The number of steps in which a request with a later rank started before this one.
    num_passed_over: usize,
}

impl NoStarvation {
    pub fn new(workload: &Workload) -> Self {
        let answers = workload.calls.iter().flat_map(|call| &call.answers);
        let prompts = answers.map(|answer| answer.request.prompt.len() + answer.output.len());
        Self {
            config: workload.config.clone(),
            longest_prompt: prompts.max().unwrap_or(0),
            requests: BTreeMap::new(),
        }
    }

    /// Returns an upper bound of the number of steps after which all running requests have ended. Until then, other
    /// requests may start before an aged request.
    fn max_steps_to_make_room(&self) -> usize {
        let num_round_steps = self
            .config
            .max_num_seqs
            .div_ceil(self.config.max_decode_seqs);
        (self.config.max_model_len * num_round_steps) as usize
    }

    /// Returns a request's rank in the order by which passing over is counted: by arrival under `fcfs`, and otherwise
    /// by submission.
    fn rank(&self, request: &Request) -> (u64, RequestId) {
        match policy::ranks_by_arrival(&self.config) {
            true => (request.arrival_us, request.id),
            false => (0, request.id),
        }
    }

    /// Returns the number of times that a request may be passed over. The policy allows some, and a follower may wait
    /// one step or more for each chunk of its leader.
    fn max_passed_over(&self) -> usize {
        let max_passed_over = self.config.max_passed_over as usize;
        let by_policy = if policy::starts_in_order(&self.config) {
            0
        } else if policy::is_by_priority(&self.config) {
            max_passed_over + self.max_steps_to_make_room()
        } else {
            max_passed_over
        };
        let by_leaders = match self.config.enable_prefix_caching {
            true => self.longest_prompt * self.config.max_num_seqs as usize,
            false => 0,
        };
        by_policy + by_leaders
    }
}

impl Checker for NoStarvation {
    fn rule(&self) -> &'static str {
        "no request starves"
    }

    fn queued(&mut self, answer: &Answer) {
        let request = &answer.request;
        let rank = self.rank(request);
        for waiting in self.requests.values_mut() {
            waiting.num_put_before += usize::from(waiting.rank > rank);
        }
        let num_prompt_tokens = request.prompt.len() as u32;
        let max_tokens = self
            .config
            .check_request(request)
            .expect("a queued request should have been refused");
        self.requests.insert(
            request.id,
            Waiting {
                rank,
                num_put_before: 0,
                num_prompt_tokens,
                num_told_tokens: 0,
                num_start_tokens: num_prompt_tokens,
                num_final_rows: num_prompt_tokens + max_tokens - 1,
                is_new: true,
                is_running: false,
                num_rows: 0,
                num_missed_steps: 0,
                max_missed_steps: 0,
                num_passed_over: 0,
            },
        );
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let (batch, slots) = (step.batch, step.slots);
        let ids = batch.started.iter().map(|start| start.request);
        let new = ids.filter(|id| self.requests[id].is_new);
        let newest = new.map(|id| self.requests[&id].rank).max();
        let bound = self.max_passed_over();
        for (id, waiting) in &mut self.requests {
            let is_passed_over = waiting.is_new && Some(waiting.rank) < newest;
            if is_passed_over && !batch.started.iter().any(|start| start.request == *id) {
                waiting.num_passed_over += 1;
                // With packing, only the head of the queue counts as passed over, and each request put before this one
                // was the head first.
                let bound = bound * (1 + waiting.num_put_before);
                ensure(waiting.num_passed_over <= bound, || {
                    let times = waiting.num_passed_over;
                    format!("request {id} was passed over {times} times, more than {bound}")
                })?;
            }
        }
        let held: BTreeSet<RequestId> = slots.values().copied().collect();
        for (id, waiting) in &mut self.requests {
            // A request without a slot has been preempted.
            waiting.is_running &= held.contains(id);
        }
        for start in &batch.started {
            let waiting = self
                .requests
                .get_mut(&start.request)
                .expect("a step starts an unknown request");
            waiting.is_new = false;
            waiting.is_running = true;
            waiting.num_missed_steps = 0;
            waiting.num_start_tokens = waiting.num_prompt_tokens + waiting.num_told_tokens;
            waiting.num_rows = start.cached_tokens.len() as u32;
        }
        let mut in_step = BTreeSet::new();
        for span in &batch.spans {
            let id = slots[&span.slot];
            in_step.insert(id);
            // A step in flight may still compute a request that has ended.
            if let Some(waiting) = self.requests.get_mut(&id) {
                waiting.num_rows = span.start + span.tokens.len() as u32 - span.num_drafts;
            }
        }
        let wants = |waiting: &Waiting| {
            waiting.is_running
                && waiting.num_rows >= waiting.num_start_tokens
                && waiting.num_rows < waiting.num_final_rows
        };
        let num_decodes = self.requests.values().filter(|w| wants(w)).count();
        let num_round_steps = num_decodes.div_ceil(self.config.max_decode_seqs as usize);
        // In a round each decoding request is in one step, and each step passes all stages of the pipeline.
        let num_round_steps = num_round_steps * self.config.max_inflight_steps as usize;
        let bound = num_round_steps + self.config.max_inflight_steps as usize;
        // Without a free page, some requests must wait until others end, and none is admitted meanwhile.
        let num_available = step.stats.num_free_pages + step.stats.num_cached_pages;
        let has_pages = num_available >= self.config.kv_groups.len();
        for (id, waiting) in &mut self.requests {
            if in_step.contains(id) || !has_pages {
                waiting.num_missed_steps = 0;
                waiting.max_missed_steps = 0;
            } else if wants(waiting) {
                waiting.num_missed_steps += 1;
                waiting.max_missed_steps = waiting.max_missed_steps.max(bound);
                ensure(waiting.num_missed_steps <= waiting.max_missed_steps, || {
                    let steps = waiting.num_missed_steps;
                    format!("request {id} decodes, and {steps} steps in a row go without it")
                })?;
            }
        }
        Ok(())
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        if output.finish.is_some() {
            self.requests.remove(&output.request);
        } else if let Some(waiting) = self.requests.get_mut(&output.request) {
            waiting.num_told_tokens += u32::from(output.sample.is_some());
        }
        Ok(())
    }
}
