//! The rules that every run must keep, whatever its load.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{
    Batch, FinishReason, PrefillAdmissionPolicy, RequestError, RequestId, RequestOutput,
    SchedulerConfig, SchedulerStats, SchedulingPolicy, SlotId, Span,
};

use crate::executor::UNDEFINED;
use crate::load::{Answer, Load};

pub type Verdict = Result<(), String>;

/// A step that has just been planned.
pub struct Planned<'a> {
    pub batch: &'a Batch,
    /// Whose the slots are.
    pub slots: &'a BTreeMap<SlotId, RequestId>,
    pub stats: SchedulerStats,
}

/// Sees what goes into the scheduler and what comes out of it, and says what is wrong with it.
pub trait Checker {
    fn rule(&self) -> &'static str;

    fn queued(&mut self, _answer: &Answer) {}

    fn aborted(&mut self, _id: RequestId) {}

    fn planned(&mut self, _step: &Planned<'_>) -> Verdict {
        Ok(())
    }

    fn step_failed(&mut self, _requests: &BTreeSet<RequestId>) {}

    fn told(&mut self, _output: &RequestOutput) -> Verdict {
        Ok(())
    }

    /// Everything that an event brings has happened.
    fn settled(&mut self, _stats: &SchedulerStats) -> Verdict {
        Ok(())
    }

    /// Nothing is left to happen.
    fn ended(&mut self, _stats: &SchedulerStats) -> Verdict {
        Ok(())
    }
}

pub fn all(load: &Load) -> Vec<Box<dyn Checker>> {
    vec![
        Box::new(Conservation),
        Box::new(OneEnd::new(load)),
        Box::<LoneRun>::default(),
        Box::new(Order::new(load)),
        Box::new(NoStarvation::new(load)),
        Box::<Billing>::default(),
        Box::new(Drafts::new(load)),
    ]
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}

/// Rule 17: every page is free, cached or in use, and at the end none is in use.
struct Conservation;

impl Checker for Conservation {
    fn rule(&self) -> &'static str {
        "pages are conserved"
    }

    fn settled(&mut self, stats: &SchedulerStats) -> Verdict {
        let sum = stats.num_free_pages + stats.num_cached_pages + stats.num_in_use_pages;
        ensure(sum == stats.num_pages, || format!("{stats:?}"))
    }

    fn ended(&mut self, stats: &SchedulerStats) -> Verdict {
        ensure(stats.num_in_use_pages == 0, || {
            format!("pages are in use by nobody: {stats:?}")
        })
    }
}

/// Rules 27 and 32: whatever befalls a request, it ends once, for a reason that it has, and is
/// silent after that.
struct OneEnd {
    max_preemptions: u32,
    live: BTreeSet<RequestId>,
    aborted: BTreeSet<RequestId>,
    in_failed_step: BTreeSet<RequestId>,
}

impl OneEnd {
    fn new(load: &Load) -> Self {
        Self {
            max_preemptions: load.config.max_preemptions,
            live: BTreeSet::new(),
            aborted: BTreeSet::new(),
            in_failed_step: BTreeSet::new(),
        }
    }
}

impl Checker for OneEnd {
    fn rule(&self) -> &'static str {
        "a request ends once"
    }

    fn queued(&mut self, answer: &Answer) {
        self.live.insert(answer.request.id);
    }

    fn aborted(&mut self, id: RequestId) {
        self.aborted.insert(id);
    }

    fn step_failed(&mut self, requests: &BTreeSet<RequestId>) {
        self.in_failed_step.extend(requests);
    }

    fn told(&mut self, output: &RequestOutput) -> Verdict {
        let id = output.request;
        ensure(self.live.contains(&id), || {
            format!("request {id} speaks after its end: {output:?}")
        })?;
        let Some(finish) = &output.finish else {
            return Ok(());
        };
        self.live.remove(&id);
        let has_reason = match finish {
            FinishReason::EndToken | FinishReason::StopToken | FinishReason::Length => true,
            FinishReason::Aborted => self.aborted.contains(&id),
            FinishReason::Error(RequestError::StepFailed(_) | RequestError::NotDrawn(_)) => {
                self.in_failed_step.contains(&id)
            }
            FinishReason::Error(RequestError::PreemptedTooOften { num_preemptions }) => {
                *num_preemptions > self.max_preemptions
            }
            FinishReason::Error(_) => false,
        };
        ensure(has_reason, || {
            format!("request {id} ends without a reason: {finish:?}")
        })
    }

    fn ended(&mut self, _: &SchedulerStats) -> Verdict {
        ensure(self.live.is_empty(), || {
            format!("requests never end: {:?}", self.live)
        })
    }
}

/// Rules 4, 23 and 25: a request gets the tokens that it gets alone, each once and in order.
#[derive(Default)]
struct LoneRun {
    answers: BTreeMap<RequestId, (Answer, usize)>,
}

impl Checker for LoneRun {
    fn rule(&self) -> &'static str {
        "outputs equal the lone run's"
    }

    fn queued(&mut self, answer: &Answer) {
        self.answers.insert(answer.request.id, (answer.clone(), 0));
    }

    fn told(&mut self, output: &RequestOutput) -> Verdict {
        let id = output.request;
        let (answer, num_seen) = self.answers.get_mut(&id).expect("a queued request");
        if let Some(sample) = &output.sample {
            let should = answer.output.get(*num_seen).copied();
            let token = (sample.token != UNDEFINED).then_some(sample.token);
            ensure(token.is_some() && token == should, || {
                format!("token {num_seen} of request {id} is {token:?}, alone it is {should:?}")
            })?;
            *num_seen += 1;
        }
        let num_prompt_tokens = answer.request.prompt.len();
        let counts_are_right = output.num_output_tokens as usize == *num_seen
            && output.num_prompt_tokens as usize == num_prompt_tokens
            && (output.num_cached_tokens as usize) < num_prompt_tokens;
        ensure(counts_are_right, || {
            format!("{output:?} after {num_seen} tokens")
        })?;
        match &output.finish {
            None | Some(FinishReason::Aborted | FinishReason::Error(_)) => Ok(()),
            Some(finish) => ensure(
                *finish == answer.finish && *num_seen == answer.output.len(),
                || {
                    let (tokens, should) = (answer.output.len(), &answer.finish);
                    format!(
                        "request {id} ends with {finish:?} after {num_seen} tokens, \
                         alone with {should:?} after {tokens}"
                    )
                },
            ),
        }
    }
}

/// Rule 10: first come, first served, what starts in one step starts in order of arrival, and
/// with FIFO admission nobody starts before one that came earlier.
struct Order {
    is_fcfs: bool,
    is_fifo: bool,
    waiting: BTreeSet<RequestId>,
    started: BTreeSet<RequestId>,
}

impl Order {
    /// A follower waits for its leader with the cache on, and others may start meanwhile.
    fn new(load: &Load) -> Self {
        let policy = load.config.prefill_admission_policy;
        let is_fcfs = load.config.scheduling_policy == SchedulingPolicy::Fcfs;
        let is_fifo = is_fcfs && policy == PrefillAdmissionPolicy::Fifo;
        Self {
            is_fcfs,
            is_fifo: is_fifo && !load.config.enable_prefix_caching,
            waiting: BTreeSet::new(),
            started: BTreeSet::new(),
        }
    }
}

impl Checker for Order {
    fn rule(&self) -> &'static str {
        "requests start in order"
    }

    fn queued(&mut self, answer: &Answer) {
        self.waiting.insert(answer.request.id);
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let batch = step.batch;
        let ids = batch.started.iter().map(|start| start.request);
        // Preempted requests come back before new ones start.
        let new: Vec<_> = ids.filter(|id| self.started.insert(*id)).collect();
        ensure(!self.is_fcfs || new.is_sorted(), || {
            format!("a step starts {new:?}")
        })?;
        for id in new {
            let first = self.waiting.first().copied();
            ensure(!self.is_fifo || first == Some(id), || {
                format!("request {id} starts before request {first:?}")
            })?;
            self.waiting.remove(&id);
        }
        Ok(())
    }

    fn told(&mut self, output: &RequestOutput) -> Verdict {
        if output.finish.is_some() {
            self.waiting.remove(&output.request);
        }
        Ok(())
    }
}

/// Rules 8 and 9: whoever runs is in every step, or in turn when decodes are limited; whoever
/// waits is passed over a bounded number of times.
struct NoStarvation {
    config: SchedulerConfig,
    longest_prompt: usize,
    requests: BTreeMap<RequestId, Waiting>,
}

struct Waiting {
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
    fn new(load: &Load) -> Self {
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
        let num_prompt_tokens = request.prompt.len() as u32;
        let max_tokens = self.config.check_request(request).expect("it was queued");
        self.requests.insert(
            request.id,
            Waiting {
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
        let newest = ids.filter(|id| self.requests[id].is_new).max();
        let bound = self.max_passed_over();
        for (id, waiting) in self.requests.range_mut(..newest.unwrap_or(RequestId(0))) {
            if waiting.is_new && !batch.started.iter().any(|start| start.request == *id) {
                waiting.num_passed_over += 1;
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

    fn told(&mut self, output: &RequestOutput) -> Verdict {
        if output.finish.is_some() {
            self.requests.remove(&output.request);
        }
        Ok(())
    }
}

/// Rule 28: without end tokens, hits, preemption and faults, exactly prompt + output − 1 rows
/// are computed.
#[derive(Default)]
struct Billing {
    num_rows: u64,
    is_exact: Option<bool>,
}

impl Checker for Billing {
    fn rule(&self) -> &'static str {
        "no row is computed twice"
    }

    fn queued(&mut self, answer: &Answer) {
        let stopping = &answer.request.stopping;
        let is_exact = stopping.end_token_ids.is_empty() && stopping.stop_token_ids.is_empty();
        self.is_exact = Some(self.is_exact.unwrap_or(true) && is_exact);
        self.num_rows += (answer.request.prompt.len() + answer.output.len() - 1) as u64;
    }

    /// A row that nothing can be drawn from may start over because of its drafts.
    fn step_failed(&mut self, requests: &BTreeSet<RequestId>) {
        self.is_exact = self
            .is_exact
            .map(|is_exact| is_exact && requests.is_empty());
    }

    fn told(&mut self, output: &RequestOutput) -> Verdict {
        if !matches!(output.finish, None | Some(FinishReason::Length)) {
            self.is_exact = Some(false);
        }
        Ok(())
    }

    fn ended(&mut self, stats: &SchedulerStats) -> Verdict {
        let is_exact = self.is_exact == Some(true)
            && stats.num_preemptions == 0
            && stats.num_prefix_hit_tokens == 0;
        let num_rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens;
        let (computed, needed) = (stats.num_scheduled_tokens - num_rejected, self.num_rows);
        ensure(!is_exact || computed == needed, || {
            format!("{computed} rows were computed, {needed} were needed")
        })
    }
}

/// Guesses take only what a step has left: no prompt is cut short for them, nobody who has a turn
/// goes without a token, and nobody is preempted.
struct Drafts {
    config: SchedulerConfig,
    num_preemptions: u64,
}

impl Drafts {
    fn new(load: &Load) -> Self {
        Self {
            config: load.config.clone(),
            num_preemptions: 0,
        }
    }
}

impl Checker for Drafts {
    fn rule(&self) -> &'static str {
        "drafts yield"
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let config = &self.config;
        let spans = &step.batch.spans;
        let num_drafts: u32 = spans.iter().map(|span| span.num_drafts).sum();
        if num_drafts == 0 {
            return Ok(());
        }
        let num_tokens = step.batch.num_tokens() as u32;
        // Nothing but the budget can have bounded a chunk.
        let is_bounded_by_budget = num_tokens - num_drafts < config.max_prefill_tokens
            && config.long_prefill_token_threshold == 0;
        let is_cut = spans.iter().any(|span| !span.sample) && config.enable_chunked_prefill;
        ensure(!is_cut || !is_bounded_by_budget, || {
            format!(
                "a prompt is cut short in a step of {num_tokens} tokens, {num_drafts} of them drafts"
            )
        })?;
        // Whoever was preempted gave its page to another's row, and there was none over; for one
        // more urgent several may go.
        let is_for_pages = config.scheduling_policy != SchedulingPolicy::Priority;
        let num_preempted = step.stats.num_preemptions - self.num_preemptions;
        let first_rows = |span: &&Span| span.start + span.tokens.len() as u32 - span.num_drafts;
        let takes_page = |span: &&Span| {
            let num_pages = first_rows(span).div_ceil(config.page_size);
            num_pages < (first_rows(span) + span.num_drafts).div_ceil(config.page_size)
        };
        let has_new_page = |span: &&Span| {
            let deltas = step
                .batch
                .tables
                .iter()
                .filter(|delta| delta.slot == span.slot);
            let ends = deltas.map(|delta| delta.first + (delta.pages.end - delta.pages.start));
            let num_needed = first_rows(span).div_ceil(config.page_size);
            ends.max().is_some_and(|end| end > num_needed)
        };
        let drafting = spans.iter().filter(|span| span.num_drafts > 0);
        let num_taking = { drafting }.filter(takes_page).filter(has_new_page).count();
        ensure(
            !is_for_pages || num_preempted == 0 || num_taking == 0,
            || format!("{num_preempted} requests are preempted and drafts get pages"),
        )
    }

    fn settled(&mut self, stats: &SchedulerStats) -> Verdict {
        self.num_preemptions = stats.num_preemptions;
        Ok(())
    }
}
