//! The scheduler: decides what the next step computes.
//!
//! This file tells the story of a step. `running_set.rs`, `slot_pool.rs` and `inflight_steps.rs` beside it own their
//! state. The rest of `impl Scheduler` is spread over the files of its subjects.
//!
//! In `queue`:
//! * `admission.rs` checks new requests, and starts a waiting one if there is room
//! * `waiting_queue.rs` sorts waiting requests
//! * `policy.rs` starts waiting requests in the order of the policy, which has a file in `policy`
//! * `patience.rs` sees that no request is passed over for ever
//! * `follower.rs` holds back requests whose prefix another one is computing
//! * `head_room.rs` says how many pages a request is expected to need
//! * `latency_objective.rs` refuses or ends requests that would be too late
//!
//! In `step`:
//! * `decode_turn.rs` gives running requests their next tokens, and pages for them
//! * `speculation.rs` fills the rest of a step with drafts
//! * `feedback.rs` takes in a step's draws, or its failure
//! * `departure.rs` finishes and preempts requests, and frees their slots and pages
//!
//! In `cache`:
//! * `publication.rs` enters computed blocks in the prefix tree
//! * `window.rs` takes and gives back pages of groups with windows
//! * `receipt.rs` takes in requests whose prompt another node computes
//! * `hold.rs` keeps pages that other nodes still read or write
//! * `spill.rs` keeps the KV of preempted requests in host memory
//! * `pin.rs` keeps prefixes in the cache
//! * `page_map.rs` shows pages, as `request_view.rs` shows requests
//!
//! `invariant.rs` checks that the state does not contradict itself.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::cache::hold::Holds;
use crate::cache::kv_cache::KvCache;
use crate::cache::receipt::Receipts;
use crate::cache::spill::Spills;
use crate::queue::latency_objective::Deadlines;
use crate::queue::output_length::OutputLengths;
use crate::queue::page_forecast::PageForecast;
use crate::queue::waiting_queue::WaitingQueue;
use crate::request_state::{Leaving, Rank, RequestIndex, RequestState, RequestTable, Stage};
use crate::step::inflight_steps::InflightSteps;
use crate::step::pace::Pace;
use crate::step::running_set::RunningSet;
use crate::step::slot_pool::SlotPool;
use crate::step::speculation::Speculator;
use crate::step::step_plan::{InflightStep, StepPlan};
use crate::{
    AdmissionError, Batch, ConfigError, FinishReason, HeadRoom, HiddenState, KvEvent,
    PromptLogprob, Request, RequestId, RequestOutput, Sample, SchedulerConfig, SchedulerStats,
    StepId,
};

/// The scheduler owns all requests and all KV pages, and does no IO.
///
/// * Commands: [`add_requests`](Self::add_requests), [`add_accepted_requests`](Self::add_accepted_requests),
///   [`abort_request`](Self::abort_request), [`end_request`](Self::end_request),
///   [`reset_prefix_cache`](Self::reset_prefix_cache), [`pin_prefix`](Self::pin_prefix)
/// * KV from and for other nodes: [`reserve`](Self::reserve),
///   [`handle_kv_arrived`](Self::handle_kv_arrived), [`handle_kv_lost`](Self::handle_kv_lost),
///   [`poll_kv_fact`](Self::poll_kv_fact), [`release_hold`](Self::release_hold),
///   [`renew_hold`](Self::renew_hold), [`poll_deadline`](Self::poll_deadline)
/// * KV in host memory: [`poll_spill_task`](Self::poll_spill_task),
///   [`handle_stored`](Self::handle_stored), [`handle_restored`](Self::handle_restored)
/// * Plan: [`schedule`](Self::schedule), and with a draft model before it
///   [`draft_requests`](Self::draft_requests) and [`give_drafts`](Self::give_drafts)
/// * Feedback: [`update_from_output`](Self::update_from_output),
///   [`handle_step_failed`](Self::handle_step_failed)
/// * Outputs: [`poll_output`](Self::poll_output), [`poll_kv_event`](Self::poll_kv_event)
/// * Getters: [`stats`](Self::stats), [`has_unfinished`](Self::has_unfinished),
///   [`page_map`](Self::page_map), [`request_views`](Self::request_views),
///   [`check_invariants`](Self::check_invariants)
///
/// A request waits, runs, may be preempted and wait again, and finishes. When it leaves the running
/// set while steps in flight still name it, it keeps its slot, pages and locks (`Stage::Leaving`)
/// until the last of those steps has returned.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) requests: RequestTable,
    pub(crate) waiting: WaitingQueue,
    pub(crate) running: RunningSet,
    /// Requests with pages and without a slot, because another node computes their KV.
    pub(crate) receipts: Receipts,
    pub(crate) holds: Holds,
    pub(crate) spills: Spills,
    pub(crate) kv: KvCache,
    pub(crate) slots: SlotPool,
    pub(crate) inflight: InflightSteps,
    pub(crate) outputs: VecDeque<RequestOutput>,
    now_us: u64,
    pub(crate) pace: Pace,
    pub(crate) output_lengths: OutputLengths,
    /// Counts the pages that requests will take: of those that run, and of those whose KV another node
    /// computes.
    pub(crate) forecast: PageForecast,
    /// The current share of [`HeadRoom::Share`](crate::HeadRoom::Share), in 1/65536.
    pub(crate) head_room_share: u32,
    pub(crate) deadlines: Deadlines,
    pub(crate) counters: SchedulerStats,
}

/// Why the prefix cache could not be reset: requests hold some of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheInUse {
    pub num_pages_in_use: usize,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let is_timed = config.head_room == HeadRoom::Estimate;
        Ok(Self {
            requests: RequestTable::default(),
            waiting: WaitingQueue::new(&config),
            running: RunningSet::default(),
            receipts: Receipts::default(),
            holds: Holds::default(),
            spills: Spills::default(),
            kv: config.new_kv_cache(),
            slots: SlotPool::new(config.max_num_seqs),
            inflight: InflightSteps::default(),
            outputs: VecDeque::new(),
            now_us: 0,
            pace: Pace::default(),
            output_lengths: OutputLengths::new(),
            forecast: PageForecast::new(
                config.page_size,
                config.num_groups_without_window(),
                is_timed,
            ),
            head_room_share: config.head_room.first_share(),
            deadlines: Deadlines::default(),
            counters: SchedulerStats::default(),
            config,
        })
    }

    /// Queues the requests of one API call, one for each of its choices: all of them or none.
    pub fn add_requests(&mut self, requests: Vec<Request>) -> Result<(), AdmissionError> {
        self.check_queue(&requests)?;
        self.queue_requests(requests, Self::check_objectives)
    }

    /// Queues requests that this node accepted before and that come back to it, as from a decode node that was
    /// lost. Neither queue limits nor latency objectives refuse them.
    pub fn add_accepted_requests(&mut self, requests: Vec<Request>) -> Result<(), AdmissionError> {
        self.queue_requests(requests, |_, _| Ok(()))
    }

    fn queue_requests(
        &mut self,
        requests: Vec<Request>,
        mut check: impl FnMut(&mut Self, &Request) -> Result<(), AdmissionError>,
    ) -> Result<(), AdmissionError> {
        let mut states = Vec::with_capacity(requests.len());
        for request in requests {
            let max_tokens = self.config.check_request(&request)?;
            check(self, &request)?;
            let is_known = |other: &RequestState| other.request.id == request.id;
            if states.iter().any(is_known) {
                return Err(AdmissionError::DuplicateId(request.id));
            }
            states.push(self.new_state(request, max_tokens, states.len())?);
        }
        for state in states {
            let index = self.requests.insert(state);
            self.note_drawn_elsewhere(index);
            self.wait(index);
        }
        Ok(())
    }

    /// Creates the state of a request that comes behind `num_before` others of its call.
    pub(crate) fn new_state(
        &self,
        request: Request,
        max_tokens: u32,
        num_before: usize,
    ) -> Result<RequestState, AdmissionError> {
        if self.requests.find(request.id).is_some() {
            return Err(AdmissionError::DuplicateId(request.id));
        }
        let rank = Rank {
            priority: self.config.scheduling_policy.rank_of(request.priority),
            arrival_us: request.arrival_us,
            arrival: self.requests.num_inserted() + num_before as u64,
        };
        let mut state = RequestState::new(request, rank, max_tokens);
        if !state.request.is_masked {
            state.speculator = Speculator::new(&self.config);
        }
        Ok(state)
    }

    /// Ends a request with one terminal output. Returns false if it had already ended.
    pub fn abort_request(&mut self, id: RequestId) -> bool {
        self.end_request(id, FinishReason::Aborted)
    }

    /// Ends a request for a reason that its tokens do not tell, with one terminal output. What steps
    /// in flight draw for it is dropped. Returns false if it had already ended.
    pub fn end_request(&mut self, id: RequestId, reason: FinishReason) -> bool {
        let Some(index) = self.requests.find(id) else {
            return false;
        };
        if self.requests[index].stage == Stage::Leaving(Leaving::Finished) {
            return false;
        }
        self.finish(index, reason, None);
        true
    }

    /// Evicts all cached prefixes except the pinned ones.
    pub fn reset_prefix_cache(&mut self) -> Result<(), CacheInUse> {
        match self.kv.num_in_use() - self.kv.num_pinned() {
            0 => {
                self.kv.clear();
                Ok(())
            }
            num_pages_in_use => Err(CacheInUse { num_pages_in_use }),
        }
    }

    /// Plans the next step: decodes, requests whose KV has arrived, prompts that have been started,
    /// waiting requests, and finally drafts. Returns `None`
    /// when there is nothing to do, or when `max_inflight_steps` steps have not returned yet.
    pub fn schedule(&mut self, now_us: u64) -> Option<Batch> {
        self.now_us = now_us;
        self.end_late_receipts();
        self.end_leases();
        if self.inflight.len() >= self.config.max_inflight_steps as usize {
            return None;
        }
        self.pace.note_time(now_us);
        self.drop_late();
        let mut plan = StepPlan::new(self.inflight.next_step(), &self.config, self.running.len());
        self.preempt_less_urgent(&mut plan);
        loop {
            let num_running = self.running.len();
            self.continue_decodes(&mut plan);
            // Every request chosen for this step may have been preempted; the others then get the
            // step.
            if !plan.batch.is_empty() || self.running.len() == num_running {
                break;
            }
        }
        self.start_arrived(&mut plan);
        loop {
            self.continue_prefills(&mut plan);
            if !self.make_room_for_prompt(&plan) {
                break;
            }
        }
        self.admit_waiting(&mut plan);
        self.fill_up_prefills(&mut plan);
        self.plan_drafts(&mut plan);
        self.commit(plan)
    }

    /// Plans the next chunk of every prompt that has been started. Its pages were allocated at
    /// admission, except those behind windows.
    fn continue_prefills(&mut self, plan: &mut StepPlan) {
        let prefills = self.running.prefilling().to_vec();
        for &index in &prefills {
            let state = &self.requests[index];
            let rest = state.prefill_end - state.num_scheduled_tokens;
            let chunk = self.chunk_len(rest, &plan.budget);
            if chunk == 0 {
                break;
            }
            let chunk = self.take_window_pages(index, chunk, plan);
            if chunk > 0 {
                self.plan_span(index, chunk, plan);
            }
        }
        for index in prefills {
            // The forecast's clock has advanced, although these requests have not decoded.
            self.recount_running(index);
        }
    }

    /// Gives the tokens that are left in the step to the prompts that
    /// `long_prefill_token_threshold` has cut short.
    fn fill_up_prefills(&mut self, plan: &mut StepPlan) {
        if self.config.long_prefill_token_threshold == 0 || !self.config.enable_chunked_prefill {
            return;
        }
        for at in 0..plan.entries.len() {
            let index = plan.entries[at].index;
            let state = &self.requests[index];
            if !state.is_prefilling() {
                continue;
            }
            let rest = state.prefill_end - state.num_scheduled_tokens;
            let num_tokens = rest.min(plan.budget.prefill_tokens());
            if num_tokens == 0 {
                return;
            }
            let num_tokens = self.take_window_pages(index, num_tokens, plan);
            if num_tokens == 0 {
                continue;
            }
            let state = &mut self.requests[index];
            plan.lengthen_span(at, state, num_tokens);
            self.note_prefilled(index);
            self.publish_filled(index, plan.batch.step);
        }
    }

    /// Adds the request's next tokens to the step and publishes the pages that they fill.
    pub(crate) fn plan_span(&mut self, index: RequestIndex, num_tokens: u32, plan: &mut StepPlan) {
        let state = &mut self.requests[index];
        let was_prefilling = state.is_prefilling();
        plan.add_span(index, state, num_tokens);
        let num_rows = state.num_rows();
        let contribution = state.contribution.as_ref();
        if contribution.is_some_and(|contribution| num_rows >= contribution.max_rows) {
            self.recount_running(index);
        }
        if was_prefilling {
            self.note_prefilled(index);
        }
        self.publish_filled(index, plan.batch.step);
    }

    /// A request that has got a chunk of its prompt may be done with prefilling.
    fn note_prefilled(&mut self, index: RequestIndex) {
        if !self.requests[index].is_prefilling() {
            self.running.end_prefill(index);
        }
    }

    /// Turns the plan into the next step in flight.
    fn commit(&mut self, mut plan: StepPlan) -> Option<Batch> {
        if plan.batch.is_empty() {
            return None;
        }
        plan.batch.released = self.slots.take_released();
        self.lower_share();
        self.counters.num_steps += 1;
        self.counters.num_scheduled_tokens += plan.batch.num_tokens() as u64;
        self.announce_exports(plan.batch.step, &plan.entries);
        self.inflight.push(InflightStep {
            step: plan.batch.step,
            spans: plan.entries,
            planned_us: self.now_us,
            num_tokens: plan.batch.num_tokens() as u32,
            num_prefill_tokens: plan.budget.num_prefill_tokens,
        });
        Some(plan.batch)
    }

    pub fn poll_output(&mut self) -> Option<RequestOutput> {
        self.outputs.pop_front()
    }

    /// Starts a subscription to what the prefix cache holds: [`poll_kv_event`](Self::poll_kv_event)
    /// returns its events, beginning with what the cache holds now. `salt` seeds the page hashes.
    pub fn watch_kv(&mut self, salt: u64) {
        self.kv.watch(salt);
    }

    pub fn unwatch_kv(&mut self) {
        self.kv.unwatch();
    }

    /// Returns the next KV event, if there is one. No more events are kept for a slow reader than a
    /// new subscription would bring.
    pub fn poll_kv_event(&mut self) -> Option<KvEvent> {
        self.kv.poll_event(self.last_returned())
    }

    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_receiving: self.receipts.num_receiving(),
            num_arrived: self.receipts.len() - self.receipts.num_receiving(),
            num_held_pages: self.holds.num_pages(),
            num_spilled_pages: self.spills.num_pages(),
            num_inflight_steps: self.inflight.len(),
            num_pages: self.config.num_pages as usize,
            num_free_pages: self.kv.num_free(),
            num_cached_pages: self.kv.num_cached(),
            num_in_use_pages: self.kv.num_in_use(),
            num_pinned_pages: self.kv.num_pinned(),
            num_evicted_pages: self.kv.num_evicted(),
            num_queued_tokens: self.waiting.num_new_tokens(),
            head_room_share: self.head_room_share,
            prefill_us: self.pace.prefill_us(1024),
            ..self.counters
        }
    }

    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Whether any request has not had its terminal output yet, or any step has not returned.
    pub fn has_unfinished(&self) -> bool {
        self.requests.len() > 0 || !self.inflight.is_empty()
    }

    pub fn num_inflight_steps(&self) -> usize {
        self.inflight.len()
    }

    /// How many of a step's tokens belong to prompts, and to output that is computed again after a
    /// preemption. 0 when the step is not in flight.
    pub fn num_prefill_tokens(&self, step: StepId) -> u32 {
        let inflight = self.inflight.iter().find(|inflight| inflight.step == step);
        inflight.map_or(0, |inflight| inflight.num_prefill_tokens)
    }

    pub(crate) fn emit(
        &mut self,
        index: RequestIndex,
        sample: Option<Sample>,
        finish: Option<FinishReason>,
    ) {
        let output = self.output(index, sample, finish);
        self.outputs.push_back(output);
    }

    pub(crate) fn emit_logprobs(&mut self, index: RequestIndex, logprobs: &[PromptLogprob]) {
        let mut output = self.output(index, None, None);
        output.prompt_logprobs = logprobs.to_vec();
        self.outputs.push_back(output);
    }

    pub(crate) fn emit_hidden_state(&mut self, index: RequestIndex, state: &HiddenState) {
        let mut output = self.output(index, None, None);
        output.hidden_state = Some(state.clone());
        self.outputs.push_back(output);
    }

    fn output(
        &self,
        index: RequestIndex,
        sample: Option<Sample>,
        finish: Option<FinishReason>,
    ) -> RequestOutput {
        let state = &self.requests[index];
        let waited_us = self.now_us.saturating_sub(state.request.arrival_us);
        RequestOutput {
            request: state.request.id,
            sample,
            prompt_logprobs: Vec::new(),
            hidden_state: None,
            finish,
            num_prompt_tokens: state.num_prompt_tokens,
            num_cached_tokens: state.num_cached_tokens.unwrap_or(0),
            num_output_tokens: state.num_output_tokens(),
            queue_us: state.queue_us.unwrap_or(waited_us),
        }
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.now_us
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{BatchOutput, RequestError};

    fn request(id: u64, num_prompt_tokens: u32, max_tokens: u32) -> Request {
        Request::greedy(RequestId(id), (0..num_prompt_tokens).collect(), max_tokens)
    }

    /// Runs until nothing is left and returns how each request ended.
    fn run(scheduler: &mut Scheduler) -> Vec<(RequestId, Option<FinishReason>)> {
        let mut ends = Vec::new();
        while let Some(batch) = scheduler.schedule(0) {
            let samples = batch
                .spans
                .iter()
                .filter(|span| span.yields.draws())
                .map(|span| {
                    let sample = Sample {
                        token: 7,
                        logprobs: None,
                    };
                    (span.slot, sample)
                });
            scheduler.update_from_output(&BatchOutput {
                step: batch.step,
                samples: samples.collect(),
                logprobs: Vec::new(),
                hidden_states: Vec::new(),
                undrawn: Vec::new(),
            });
            while let Some(output) = scheduler.poll_output() {
                if output.finish.is_some() {
                    ends.push((output.request, output.finish));
                }
            }
            scheduler.kv.check_invariants();
        }
        while let Some(output) = scheduler.poll_output() {
            ends.push((output.request, output.finish));
        }
        ends
    }

    /// Admission never lets this happen, so the test takes pages away behind the scheduler's back.
    #[test]
    fn request_too_large_for_pool_ends_and_server_goes_on() {
        let mut config = SchedulerConfig::new(4, 4, 64);
        config.head_room = HeadRoom::fixed_share(0);
        let mut scheduler = Scheduler::new(config).unwrap();
        let mut stolen = Vec::new();
        assert!(scheduler.kv.try_allocate(2, &mut stolen));
        let requests = vec![request(0, 4, 10)];
        scheduler.add_requests(requests).unwrap();
        let error = RequestError::PoolExhausted { num_pages: 4 };
        let end = Some(FinishReason::Error(error));
        assert_eq!(run(&mut scheduler), [(RequestId(0), end)]);
        assert!(!scheduler.has_unfinished());

        let requests = vec![request(1, 4, 4)];
        scheduler.add_requests(requests).unwrap();
        let end = Some(FinishReason::Length);
        assert_eq!(run(&mut scheduler), [(RequestId(1), end)]);
    }
}
