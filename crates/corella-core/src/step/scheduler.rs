//! The scheduler: decides what the next step computes.
//!
//! This file has the sequence of a step. Each part owns its state, and only the part's methods change it:
//!
//! | part | owns |
//! |---|---|
//! | [`RequestTable`] | the live requests; `request_state.rs` has the state of each |
//! | [`WaitingQueue`] | waiting requests in order, followers, and the times at which latency objectives are checked |
//! | [`RunningSet`] | running requests by rank, prefilling ones, and the slots |
//! | [`WaitingForRemoteKv`] | requests with pages and without a slot, because others fill the pages |
//! | [`Holds`] | pages that other nodes still read or write, fetches among them |
//! | [`Spills`] | KV of preempted requests in host memory |
//! | [`KvCache`] | pages, and the prefix tree over them |
//! | [`LengthForecast`] | the expected lengths of requests, and the pages kept for them |
//! | [`InflightSteps`] | steps that have not returned |
//! | [`Pace`] | the time, and the duration of steps |
//! | [`Journal`] | outputs and counts |
//!
//! Work that concerns several parts is in the files of `scheduler/`, which call the methods of the parts:
//!
//! * `admission.rs` counts what a waiting request needs, and starts it; `ageing.rs` gives every request its turn;
//!   `start_order.rs` starts requests in the order of the policy's keys, `packing.rs` packs them, and `preemption.rs`
//!   makes room for urgent ones
//! * `latency_objective.rs` refuses or ends requests that would be too late
//! * `decode_turn.rs` gives running requests their next tokens, and pages for them; `window.rs` takes and gives back
//!   pages of groups with windows; `speculation.rs` fills the rest of a step with drafts
//! * `snapshot.rs` takes copies of recurrent state after blocks
//! * `publication.rs` enters computed blocks in the prefix tree, and removes void ones; `retention.rs` retains the
//!   prefixes that requests have marked
//! * `feedback.rs` processes a step's draws, or its failure; `departure.rs` finishes and preempts requests, and frees
//!   their slots and pages
//! * `remote_kv.rs` accepts requests whose prompt another node computes, `hold.rs` exports to other nodes, and
//!   `spill.rs` stores KV of preempted requests; `fetch.rs` fetches blocks, `block_hold.rs` keeps blocks that others
//!   load, and `copy_offer.rs` offers blocks to a lower tier
//! * `poll.rs` answers a driver's polls, in a fixed order; `view.rs` shows requests and pages
//! * `invariant.rs` checks that the parts agree

pub(crate) mod admission;
mod ageing;
mod block_hold;
mod copy_offer;
mod decode_turn;
mod departure;
mod feedback;
mod fetch;
mod hold;
mod invariant;
mod latency_objective;
mod packing;
mod poll;
mod preemption;
mod publication;
pub(crate) mod remote_kv;
mod retention;
mod snapshot;
pub(crate) mod speculation;
mod spill;
mod start_order;
mod view;
mod window;

use alloc::vec::Vec;

use crate::cache::hold::Holds;
use crate::cache::kv_cache::KvCache;
use crate::cache::spill::Spills;
use crate::pace::Pace;
use crate::queue::length_forecast::LengthForecast;
use crate::queue::waiting_for_remote_kv::WaitingForRemoteKv;
use crate::queue::waiting_queue::WaitingQueue;
use crate::request_state::{Leaving, Phase, Rank, RequestIndex, RequestState, RequestTable};
use crate::scheduler_config::policy::Policy;
use crate::step::inflight_steps::InflightSteps;
use crate::step::journal::Journal;
use crate::step::running_set::RunningSet;
use crate::step::step_plan::{InflightStep, StepPlan};
use crate::{
    AdmissionError, Batch, ConfigError, FinishReason, HiddenState, Namespace, PinError,
    PromptLogprob, Request, RequestId, RequestOutput, Sample, SchedulerConfig, SchedulerStats,
    StepId, TokenId,
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
/// * Blocks from elsewhere: [`begin_fetch`](Self::begin_fetch), [`handle_fetched`](Self::handle_fetched),
///   [`poll_fetch_cancel`](Self::poll_fetch_cancel), [`handle_fetch_ended`](Self::handle_fetch_ended)
/// * Blocks for elsewhere: [`look_up_blocks`](Self::look_up_blocks), [`hold_blocks`](Self::hold_blocks),
///   [`poll_ended_hold`](Self::poll_ended_hold), [`release_blocks`](Self::release_blocks)
/// * Blocks for a lower tier: [`offer_copies`](Self::offer_copies), [`poll_copy_offer`](Self::poll_copy_offer),
///   [`retract_copy_offer`](Self::retract_copy_offer)
/// * KV in host memory: [`poll_spill_task`](Self::poll_spill_task),
///   [`handle_stored`](Self::handle_stored), [`handle_restored`](Self::handle_restored)
/// * Plan: [`schedule`](Self::schedule), and with a draft model before it
///   [`draft_requests`](Self::draft_requests) and [`give_drafts`](Self::give_drafts)
/// * Feedback: [`update_from_output`](Self::update_from_output),
///   [`handle_step_failed`](Self::handle_step_failed)
/// * Outputs: [`poll_output`](Self::poll_output), [`poll_kv_event`](Self::poll_kv_event)
/// * Getters: [`stats`](Self::stats), [`has_unfinished`](Self::has_unfinished), [`page_map`](Self::page_map),
///   [`request_views`](Self::request_views), [`check_invariants`](Self::check_invariants)
///
/// A request waits, runs, may be preempted and wait again, and finishes. When it leaves the running
/// set while steps in flight still name it, it keeps its slot, pages and locks (`Phase::Leaving`)
/// until the last of those steps has returned.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    policy: Policy,
    requests: RequestTable,
    waiting: WaitingQueue,
    running: RunningSet,
    remote_kv: WaitingForRemoteKv,
    holds: Holds,
    spills: Spills,
    kv: KvCache,
    forecast: LengthForecast,
    inflight: InflightSteps,
    pace: Pace,
    journal: Journal,
}

/// The reason for which the prefix cache could not be reset: requests hold some of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheInUse {
    pub num_pages_in_use: usize,
}

fn new_cache(config: &SchedulerConfig) -> KvCache {
    let kv = KvCache::new(config.num_pages, config.page_size, &config.kv_groups);
    match &config.recurrent_state {
        Some(state) => kv.with_snapshots(state.num_snapshots),
        None => kv,
    }
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let policy = config.scheduling_policy.policy();
        Ok(Self {
            requests: RequestTable::default(),
            waiting: WaitingQueue::new(&config, &policy),
            running: RunningSet::new(config.max_num_seqs),
            remote_kv: WaitingForRemoteKv::default(),
            holds: Holds::default(),
            spills: Spills::default(),
            kv: new_cache(&config),
            forecast: LengthForecast::new(&config),
            inflight: InflightSteps::default(),
            pace: Pace::default(),
            journal: Journal::default(),
            policy,
            config,
        })
    }

    /// Queues the requests of one API call, one for each of its choices. Either all are queued or none.
    pub fn add_requests(&mut self, requests: Vec<Request>) -> Result<(), AdmissionError> {
        let num_free_slots = self.running.num_free_slots();
        self.waiting
            .check_room(&requests, &self.config, num_free_slots)?;
        self.queue_requests(requests, Self::check_objectives)
    }

    /// Queues requests that this node had accepted and that come back, for example from a lost decode node. Neither
    /// queue limits nor latency objectives refuse them.
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
            let is_known = |other: &RequestState| other.id() == request.id;
            if states.iter().any(is_known) {
                return Err(AdmissionError::DuplicateId(request.id));
            }
            states.push(self.new_state(request, max_tokens, states.len())?);
        }
        for state in states {
            let index = self.requests.insert(state);
            let state = &mut self.requests[index];
            self.forecast.note_drawn_elsewhere(state);
            self.waiting.add(index, state, &self.pace);
            self.set_branches_to(index);
        }
        Ok(())
    }

    /// Creates the state of a request. `num_before` requests of the same call come before it.
    fn new_state(
        &self,
        request: Request,
        max_tokens: u32,
        num_before: usize,
    ) -> Result<RequestState, AdmissionError> {
        if self.requests.find(request.id).is_some() {
            return Err(AdmissionError::DuplicateId(request.id));
        }
        let rank = Rank {
            key: 0,
            arrival_us: request.arrival_us,
            arrival: self.requests.num_inserted() + num_before as u64,
        };
        let mut state = RequestState::new(request, rank, max_tokens, &self.config);
        if self.policy.lookahead.is_none() {
            state.set_key(self.key(&state, 0));
        }
        Ok(state)
    }

    /// Ends a request with one terminal output. Returns false if it had already ended.
    pub fn abort_request(&mut self, id: RequestId) -> bool {
        self.end_request(id, FinishReason::Aborted)
    }

    /// Ends a request with one terminal output, for a reason that its tokens do not show. Draws of steps in flight are
    /// dropped. Returns false if it had already ended.
    pub fn end_request(&mut self, id: RequestId, reason: FinishReason) -> bool {
        let Some(index) = self.requests.find(id) else {
            return false;
        };
        if self.requests[index].phase() == Phase::Leaving(Leaving::Finished) {
            return false;
        }
        self.finish(index, reason, None);
        true
    }

    /// Evicts all cached prefixes except the pinned ones, retained ones too.
    pub fn reset_prefix_cache(&mut self) -> Result<(), CacheInUse> {
        match self.kv.num_in_use() - self.kv.num_pinned() {
            0 => {
                self.kv.clear();
                Ok(())
            }
            num_pages_in_use => Err(CacheInUse { num_pages_in_use }),
        }
    }

    /// Pins the whole blocks of `tokens` in the prefix cache, even through
    /// [`reset_prefix_cache`](Self::reset_prefix_cache): all of them or none. In groups with windows, only the pages
    /// that a query after those tokens reads are pinned. Returns the number of newly pinned pages.
    ///
    /// A page loses its pin if its contents prove void: it was pinned while the request that computed it was running,
    /// and the request then ended because its logits were not numbers.
    pub fn pin_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
    ) -> Result<usize, PinError> {
        let last_returned = self.inflight.last_returned();
        let max_pages = self.config.max_pinned_pages;
        self.kv
            .pin_prefix(namespace, tokens, last_returned, max_pages)
    }

    /// Plans the next step: decodes, requests whose KV has arrived, started prompts, waiting requests, and finally
    /// drafts. Returns `None` when no work is left, or when `max_inflight_steps` steps have not returned yet.
    pub fn schedule(&mut self, now_us: u64) -> Option<Batch> {
        self.note_time(now_us);
        if self.inflight.len() >= self.config.max_inflight_steps as usize {
            return None;
        }
        self.pace.time_returned();
        self.drop_late();
        self.let_go_of_last_step();
        let mut plan = StepPlan::new(self.inflight.next_step(), &self.config, self.running.len());
        self.rank_running();
        self.preempt_less_urgent(&mut plan);
        loop {
            let num_running = self.running.len();
            self.continue_decodes(&mut plan);
            // All requests chosen for this step may have been preempted. Then the step is planned again for the others.
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
        self.waiting.end_round(self.has_room_to_start(&plan));
        if plan.batch.is_empty() {
            self.give_up_loads_for_waiting();
        }
        self.fill_up_prefills(&mut plan);
        self.plan_drafts(&mut plan);
        self.commit(plan)
    }

    /// Sets the time, and handles all deadlines up to `now_us`. [`schedule`](Self::schedule) does so, too. Between two
    /// steps, a driver calls this before it reports a fact with which a lease or timeout begins.
    pub fn note_time(&mut self, now_us: u64) {
        self.pace.set_now(now_us);
        self.end_late_remote_kv();
        self.holds.end_leases(now_us);
        self.holds.of_blocks_mut().end_late(now_us);
        self.end_late_fetches();
        self.kv.end_retentions(now_us);
    }

    /// Plans the next chunk of every started prompt. The prompt's pages were allocated at admission, except pages of
    /// groups with windows.
    fn continue_prefills(&mut self, plan: &mut StepPlan) {
        let prefills = self.running.prefilling().to_vec();
        for &index in &prefills {
            let state = &self.requests[index];
            let rest = state.num_left_to_prefill();
            let chunk = self.chunk_len(rest, &plan.budget);
            if chunk == 0 {
                break;
            }
            let chunk = self.end_at_snapshot(index, chunk, plan.batch.step);
            let chunk = self.take_window_pages(index, chunk, plan);
            if chunk > 0 {
                self.plan_span(index, chunk, plan);
            }
        }
        for index in prefills {
            // The forecast's clock has advanced, although these requests have not decoded.
            self.forecast.recount(&mut self.requests[index]);
        }
    }

    /// Gives the remaining tokens of the step to the prompts that `long_prefill_token_threshold` has cut short.
    fn fill_up_prefills(&mut self, plan: &mut StepPlan) {
        if self.config.long_prefill_token_threshold == 0 || !self.config.enable_chunked_prefill {
            return;
        }
        for at in 0..plan.entries.len() {
            let index = plan.entries[at].index;
            let state = &self.requests[index];
            if !state.is_prefilling() || plan.takes_snapshot_of(plan.entries[at].slot) {
                continue;
            }
            let room = plan.budget.prefill_tokens();
            if room == 0 {
                return;
            }
            let num_planned = plan.batch.spans[at].tokens.len() as u32;
            let room = room.min(self.config.max_chunk_tokens - num_planned);
            let num_tokens = state.num_left_to_prefill().min(room);
            if num_tokens == 0 {
                continue;
            }
            let num_tokens = self.end_at_snapshot(index, num_tokens, plan.batch.step);
            let num_tokens = self.take_window_pages(index, num_tokens, plan);
            if num_tokens == 0 {
                continue;
            }
            let state = &mut self.requests[index];
            plan.lengthen_span(at, state, num_tokens);
            self.note_planned(index, true, plan);
        }
    }

    /// Adds the request's next tokens to the step and publishes the pages that they fill.
    fn plan_span(&mut self, index: RequestIndex, num_tokens: u32, plan: &mut StepPlan) {
        let state = &mut self.requests[index];
        let was_prefilling = state.is_prefilling();
        plan.add_span(index, state, num_tokens);
        let num_rows = state.num_rows();
        let contribution = state.contribution();
        if contribution.is_some_and(|contribution| num_rows >= contribution.max_rows) {
            self.forecast.recount(&mut self.requests[index]);
        }
        self.note_planned(index, was_prefilling, plan);
    }

    /// Publishes the blocks that a request's span fills, and takes a snapshot after the span if one is due. A request
    /// with a chunk of its prompt may finish prefilling.
    fn note_planned(&mut self, index: RequestIndex, is_chunk: bool, plan: &mut StepPlan) {
        if is_chunk && !self.requests[index].is_prefilling() {
            self.running.end_prefill(index);
        }
        self.publish_filled(index, plan.batch.step);
        if self.kv.is_recurrent() {
            self.take_snapshot(index, plan);
        }
    }

    /// Turns the plan into the next step in flight.
    fn commit(&mut self, mut plan: StepPlan) -> Option<Batch> {
        if plan.batch.is_empty() {
            return None;
        }
        plan.batch.released = self.running.take_released_slots();
        self.forecast.lower_share();
        let counters = self.journal.counters();
        counters.num_steps += 1;
        counters.num_scheduled_tokens += plan.batch.num_tokens() as u64;
        self.announce_exports(plan.batch.step, &plan.entries);
        self.inflight.push(InflightStep {
            step: plan.batch.step,
            spans: plan.entries,
            planned_us: self.pace.now_us(),
            num_tokens: plan.batch.num_tokens() as u32,
            num_prefill_tokens: plan.budget.num_prefill_tokens,
        });
        Some(plan.batch)
    }

    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_receiving: self.remote_kv.num_receiving(),
            num_arrived: self.remote_kv.len() - self.remote_kv.num_receiving(),
            num_held_pages: self.holds.num_pages(),
            num_spilled_pages: self.spills.num_pages(),
            num_fetching_pages: self.holds.fetches().num_pages(),
            num_served_pages: self.holds.of_blocks().num_lent_pages(),
            num_block_holds: self.holds.of_blocks().len(),
            num_inflight_steps: self.inflight.len(),
            num_pages: self.config.num_pages as usize,
            num_free_pages: self.kv.num_free(),
            num_cached_pages: self.kv.num_cached(),
            num_in_use_pages: self.kv.num_in_use(),
            num_pinned_pages: self.kv.num_pinned(),
            num_retained_pages: self.kv.num_retained(),
            num_evicted_pages: self.kv.num_evicted(),
            num_evicted_retained_pages: self.kv.num_retained_evicted(),
            num_snapshots: self.kv.num_snapshots(),
            num_queued_tokens: self.waiting.num_new_tokens(),
            head_room_share: self.forecast.share(),
            prefill_us: self.pace.prefill_us(1024),
            bulk_prefill_us: self.pace.bulk_prefill_us(),
            expected_tpot_us: self.expected_tpot_us(),
            ..self.journal.counts()
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

    /// The number of a step's tokens that belong to prompts, and to output that is computed again after a preemption. 0
    /// when the step is not in flight.
    pub fn num_prefill_tokens(&self, step: StepId) -> u32 {
        let inflight = self.inflight.iter().find(|inflight| inflight.step == step);
        inflight.map_or(0, |inflight| inflight.num_prefill_tokens)
    }

    fn emit(&mut self, index: RequestIndex, sample: Option<Sample>, finish: Option<FinishReason>) {
        let output = self.output(index, sample, finish);
        self.journal.emit(output);
    }

    fn emit_logprobs(&mut self, index: RequestIndex, logprobs: &[PromptLogprob]) {
        let mut output = self.output(index, None, None);
        output.prompt_logprobs = logprobs.into();
        self.journal.emit(output);
    }

    fn emit_hidden_state(&mut self, index: RequestIndex, state: &HiddenState) {
        let mut output = self.output(index, None, None);
        output.hidden_state = Some(state.clone());
        self.journal.emit(output);
    }

    fn output(
        &self,
        index: RequestIndex,
        sample: Option<Sample>,
        finish: Option<FinishReason>,
    ) -> RequestOutput {
        let state = &self.requests[index];
        RequestOutput {
            request: state.id(),
            sample,
            prompt_logprobs: [].into(),
            hidden_state: None,
            finish,
            num_prompt_tokens: state.num_prompt_tokens(),
            cache_use: state.cache_use(),
            num_output_tokens: state.num_output_tokens(),
            queue_us: state.queue_us(self.pace.now_us()),
        }
    }

    /// Adds up the pages that a rule without regard to time keeps. These pages change with every token, so the sum is
    /// made before each use. Requests without a slot are counted anew, because the clock advances while they take no
    /// rows.
    fn keep_pages_of_running(&mut self) {
        for index in self.remote_kv.iter() {
            self.forecast.recount(&mut self.requests[index]);
        }
        let counted = self.running.iter().chain(self.remote_kv.iter());
        let requests = &self.requests;
        self.forecast
            .keep_pages(counted.map(|index| &requests[index]));
    }

    /// Raises the share of the head room after a preemption.
    fn raise_share(&mut self) {
        let requests = &self.requests;
        let running = self.running.iter().map(|index| &requests[index]);
        self.forecast.raise_share(running);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{BatchOutput, HeadRoom, KvGroup, RequestError};

    fn request(id: u64, num_prompt_tokens: u32, max_tokens: u32) -> Request {
        Request::greedy(RequestId(id), (0..num_prompt_tokens).collect(), max_tokens)
    }

    /// Returns a step to the scheduler, in which all spans draw the same token.
    fn return_step(scheduler: &mut Scheduler, batch: &Batch) {
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
    }

    /// Runs until no request is left and returns each request's end.
    fn run(scheduler: &mut Scheduler) -> Vec<(RequestId, Option<FinishReason>)> {
        let mut ends = Vec::new();
        while let Some(batch) = scheduler.schedule(0) {
            return_step(scheduler, &batch);
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

    /// Admission refuses such a request, so the test takes pages away behind the scheduler's back.
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

    /// Pages of groups with windows are taken chunk by chunk, so a prompt may lack some when it has begun.
    #[test]
    fn a_prompt_that_gets_no_more_pages_ends() {
        let mut config = SchedulerConfig::new(6, 4, 64);
        config.kv_groups = vec![KvGroup { window: Some(8) }];
        config.max_prefill_tokens = 8;
        let mut scheduler = Scheduler::new(config).unwrap();
        scheduler.add_requests(vec![request(0, 40, 2)]).unwrap();
        let batch = scheduler.schedule(0).unwrap();
        let num_available = scheduler.kv.num_available();
        assert!(scheduler.kv.try_allocate(num_available, &mut Vec::new()));
        return_step(&mut scheduler, &batch);
        let error = RequestError::PoolExhausted { num_pages: 6 };
        let end = Some(FinishReason::Error(error));
        assert_eq!(run(&mut scheduler), [(RequestId(0), end)]);
        assert!(!scheduler.has_unfinished());
    }

    /// Four of eight tokens are a middle chunk, for which no logits are computed.
    #[test]
    #[should_panic(expected = "a reason for a span that yields nothing")]
    fn what_yields_nothing_cannot_fail() {
        let mut config = SchedulerConfig::new(4, 4, 64);
        config.max_prefill_tokens = 4;
        let mut scheduler = Scheduler::new(config).unwrap();
        scheduler.add_requests(vec![request(0, 8, 1)]).unwrap();
        let batch = scheduler.schedule(0).unwrap();
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: Vec::new(),
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: vec![(batch.spans[0].slot, "no number".into())],
        });
    }
}
