//! Whether everybody gets on: those that run step by step, those that wait in the end.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{
    PrefillAdmissionPolicy, Request, RequestId, RequestOutput, SchedulerConfig, SchedulingPolicy,
};

use crate::checker::{Checker, Planned, Verdict, ensure};
use crate::load::{Answer, Load};

/// Rules 8 and 9: whoever runs is in every step, or in turn when decodes are limited; whoever
/// waits is passed over a bounded number of times.
pub struct NoStarvation {
    config: SchedulerConfig,
    longest_prompt: usize,
    requests: BTreeMap<RequestId, Waiting>,
}

struct Waiting {
    turn: (u64, RequestId),
    /// Requests that were queued later and go before it, having arrived earlier.
    num_put_before: usize,
    num_prompt_tokens: u32,
    num_final_rows: u32,
    is_new: bool,
    is_running: bool,
    /// Rows planned so far.
    num_rows: u32,
    /// Steps, one after another, that should have held it and did not.
    num_missed_steps: usize,
    /// The most that it may miss, by the most crowded of those.
    max_missed_steps: usize,
    /// Steps in which someone started that came later.
    num_passed_over: usize,
}

impl NoStarvation {
    pub fn new(load: &Load) -> Self {
        let answers = load.calls.iter().flat_map(|call| &call.answers);
        let prompts = answers.map(|answer| answer.request.prompt.len() + answer.output.len());
        Self {
            config: load.config.clone(),
            longest_prompt: prompts.max().unwrap_or(0),
            requests: BTreeMap::new(),
        }
    }

    /// Steps until those that run have ended, at the latest, and with them the time in which
    /// others may start before one that was passed over too often.
    fn max_steps_to_make_room(&self) -> usize {
        let num_turns = self
            .config
            .max_num_seqs
            .div_ceil(self.config.max_decode_seqs);
        (self.config.max_model_len * num_turns) as usize
    }

    /// In what order requests count as passed over: where arrival decides, those that arrived
    /// earlier go before it by right.
    fn turn(&self, request: &Request) -> (u64, RequestId) {
        match self.config.scheduling_policy {
            SchedulingPolicy::Fcfs => (request.arrival_us, request.id),
            _ => (0, request.id),
        }
    }

    /// A leader's chunks hold its followers back, one step each at least.
    fn max_passed_over(&self) -> usize {
        let is_in_order = self.config.scheduling_policy == SchedulingPolicy::Fcfs
            && self.config.prefill_admission_policy == PrefillAdmissionPolicy::Fifo;
        let by_policy = match (is_in_order, self.config.scheduling_policy) {
            (true, _) => 0,
            (false, SchedulingPolicy::Priority) => {
                self.config.max_passed_over as usize + self.max_steps_to_make_room()
            }
            (false, _) => self.config.max_passed_over as usize,
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
        "nobody starves"
    }

    fn queued(&mut self, answer: &Answer) {
        let request = &answer.request;
        let turn = self.turn(request);
        for waiting in self.requests.values_mut() {
            waiting.num_put_before += usize::from(waiting.turn > turn);
        }
        let num_prompt_tokens = request.prompt.len() as u32;
        let max_tokens = self.config.check_request(request).expect("it was queued");
        self.requests.insert(
            request.id,
            Waiting {
                turn,
                num_put_before: 0,
                num_prompt_tokens,
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
        let newest = new.map(|id| self.requests[&id].turn).max();
        let bound = self.max_passed_over();
        for (id, waiting) in &mut self.requests {
            let is_passed_over = waiting.is_new && Some(waiting.turn) < newest;
            if is_passed_over && !batch.started.iter().any(|start| start.request == *id) {
                waiting.num_passed_over += 1;
                // Packing looks at who is first: each that came to be before it has its own time.
                let bound = bound * (1 + waiting.num_put_before);
                ensure(waiting.num_passed_over <= bound, || {
                    let times = waiting.num_passed_over;
                    format!("request {id} was passed over {times} times, more than {bound}")
                })?;
            }
        }
        let held: BTreeSet<RequestId> = slots.values().copied().collect();
        for (id, waiting) in &mut self.requests {
            // Without a slot it has been preempted.
            waiting.is_running &= held.contains(id);
        }
        for start in &batch.started {
            let waiting = self
                .requests
                .get_mut(&start.request)
                .expect("a live request");
            waiting.is_new = false;
            waiting.is_running = true;
            waiting.num_missed_steps = 0;
            waiting.num_rows = start.cached_tokens.len() as u32;
        }
        let mut in_step = BTreeSet::new();
        for span in &batch.spans {
            let id = slots[&span.slot];
            in_step.insert(id);
            // One that has ended may be computed once more.
            if let Some(waiting) = self.requests.get_mut(&id) {
                waiting.num_rows = span.start + span.tokens.len() as u32 - span.num_drafts;
            }
        }
        let wants = |waiting: &Waiting| {
            waiting.is_running
                && waiting.num_rows >= waiting.num_prompt_tokens
                && waiting.num_rows < waiting.num_final_rows
        };
        let num_decodes = self.requests.values().filter(|w| wants(w)).count();
        let num_turns = num_decodes.div_ceil(self.config.max_decode_seqs as usize);
        // A turn lasts a round through the pipeline.
        let num_turns = num_turns * self.config.max_inflight_steps as usize;
        let bound = num_turns + self.config.max_inflight_steps as usize;
        // Without a page some must wait for those that leave; nobody is admitted meanwhile.
        let has_pages = step.stats.num_free_pages + step.stats.num_cached_pages > 0;
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
        }
        Ok(())
    }
}
