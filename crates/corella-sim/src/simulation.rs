//! One run: the scheduler plays a workload in virtual time while the checkers watch.

pub(crate) mod fetcher;
pub(crate) mod reader;
pub(crate) mod totals;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use corella_core::{
    AdmissionError, Batch, FetchId, FinishReason, HoldId, InputToken, KvEvent, PageHash, Request,
    RequestError, RequestId, RequestOutput, Scheduler, SchedulerConfig, SchedulerStats, SlotId,
    Span,
};

use crate::check::checker;
use crate::check::kept_prefix::KeptPrefixes;
use crate::check::verdict::{Checker, Planned, Verdict};
use crate::event_queue::EventQueue;
use crate::executor::host_memory::HostMemory;
use crate::executor::{CheckingExecutor, Returned, root_row};
use crate::random::Random;
use crate::simulation::fetcher::Fetcher;
use crate::simulation::reader::Reader;
use crate::simulation::totals::Totals;
use crate::violation::Violation;
use crate::workload::progress::Progress;
use crate::workload::{Answer, Station, Workload};

/// Plays a workload to its end. Returns the first broken rule, if any. Failed assertions of the executor and of the
/// scheduler panic.
pub fn simulate(workload: &Workload, seed: u64) -> Result<Totals, Violation> {
    let mut simulation = Simulation::new(workload, seed);
    simulation.run()?;
    Ok(simulation.totals)
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Call(usize),
    Reset,
    Pin(usize),
    Fetch(usize),
    WriterActs(FetchId),
    ReaderEnds(HoldId),
    StepReturns,
    CopyEnds,
}

struct Simulation<'a> {
    workload: &'a Workload,
    random: Random,
    now_us: u64,
    events: EventQueue<Event>,
    scheduler: Scheduler,
    executor: CheckingExecutor,
    host: HostMemory,
    fetcher: Fetcher,
    reader: Reader,
    /// Steps in flight, oldest first.
    inflight: VecDeque<Inflight>,
    last_return_us: u64,
    slots: BTreeMap<SlotId, RequestId>,
    /// Slots whose requests have drawn no token since they took the slot.
    prefilling: BTreeSet<SlotId>,
    requests: BTreeMap<RequestId, Progress>,
    answers: BTreeMap<RequestId, &'a Answer>,
    /// The pages that are cached according to the KV events so far.
    heard: BTreeSet<PageHash>,
    kept: KeptPrefixes,
    head_room_share: u32,
    latest_arrival_us: u64,
    checkers: Vec<Box<dyn Checker>>,
    totals: Totals,
}

struct Inflight {
    named: BTreeSet<RequestId>,
    planned_us: u64,
    num_tokens: u64,
}

impl<'a> Simulation<'a> {
    fn new(workload: &'a Workload, seed: u64) -> Self {
        let mut scheduler =
            Scheduler::new(workload.config.clone()).expect("the workload's limits are invalid");
        scheduler.watch_kv(seed);
        let roots = workload.answers().map(|answer| {
            let request = &answer.request;
            (request.id, root_row(&request.namespace))
        });
        let mut simulation = Self {
            workload,
            random: Random(!seed),
            now_us: 0,
            events: EventQueue::new(),
            host: HostMemory::new(
                &scheduler,
                workload.max_copy_us,
                workload.copies_fail_once_in,
                seed,
            ),
            fetcher: Fetcher::new(&scheduler, workload.max_page_us, seed),
            reader: Reader::new(
                &scheduler,
                workload.max_page_us * 10,
                workload.undrawn_once_in > 0,
                seed,
            ),
            scheduler,
            executor: CheckingExecutor::new(&workload.config, workload.alphabet, roots.collect()),
            inflight: VecDeque::new(),
            last_return_us: 0,
            slots: BTreeMap::new(),
            prefilling: BTreeSet::new(),
            requests: BTreeMap::new(),
            answers: BTreeMap::new(),
            heard: BTreeSet::new(),
            kept: KeptPrefixes::default(),
            head_room_share: 0,
            latest_arrival_us: 0,
            checkers: checker::all(workload),
            totals: Totals {
                num_runs: 1,
                ..Totals::default()
            },
        };
        for (index, call) in workload.calls.iter().enumerate() {
            simulation.push(call.at_us, Event::Call(index));
        }
        for &at_us in &workload.resets_us {
            simulation.push(at_us, Event::Reset);
        }
        for (index, pin) in workload.pins.iter().enumerate() {
            simulation.push(pin.at_us, Event::Pin(index));
        }
        for (index, fetch) in workload.fetches.iter().enumerate() {
            simulation.push(fetch.at_us, Event::Fetch(index));
        }
        simulation.head_room_share = simulation.scheduler.stats().head_room_share;
        simulation
    }

    fn push(&mut self, at_us: u64, event: Event) {
        self.events.push(at_us, event);
    }

    fn run(&mut self) -> Result<(), Violation> {
        while let Some((at_us, event)) = self.events.pop() {
            self.now_us = at_us;
            match event {
                Event::Call(index) => self.call(index)?,
                Event::Reset => self.reset()?,
                Event::Pin(index) => self.pin(index)?,
                Event::Fetch(index) => self.begin_fetch(index),
                Event::WriterActs(id) => self.act_as_writer(id),
                Event::ReaderEnds(id) => {
                    let (scheduler, executor) = (&mut self.scheduler, &self.executor);
                    self.reader.end(id, scheduler, executor, self.now_us);
                }
                Event::StepReturns => self.return_step()?,
                Event::CopyEnds => self.host.end_copy(&mut self.scheduler, &mut self.executor),
            }
            self.settle()?;
            self.give_drafts();
            while let Some(batch) = self.scheduler.schedule(self.now_us) {
                // Planning a step can end requests, too.
                self.take_outputs()?;
                self.submit(&batch)?;
                self.settle()?;
            }
            self.settle()?;
            self.fetcher.take_cancels(&mut self.scheduler);
            self.reader.take_ended(&mut self.scheduler);
            let copy_us = self
                .host
                .begin_copy(&mut self.scheduler, &mut self.executor);
            if let Some(copy_us) = copy_us {
                self.push(self.now_us + copy_us, Event::CopyEnds);
            }
        }
        let stats = self.scheduler.stats();
        self.totals.take_stats(&stats);
        if self.workload.config.has_windows() {
            self.totals.num_window_hit_tokens = stats.num_prefix_hit_tokens;
        }
        self.totals.num_events = self.events.num_events();
        self.totals.num_failed_copies = self.host.num_failed();
        self.fetcher.count(&mut self.totals);
        self.reader.count(&mut self.totals);
        if stats.num_fetching_pages + stats.num_block_holds > 0 {
            let what = format!("pages or holds are left: {stats:?}");
            return Err(self.violation("pages of fetches and holds are given back", what));
        }
        if !self.host.is_empty() || stats.num_spilled_pages > 0 {
            let what = format!("host memory holds rows or copies: {stats:?}");
            return Err(self.violation("host memory is given back", what));
        }
        if self.scheduler.has_unfinished() {
            let what = format!("requests are left, but no event: {stats:?}");
            return Err(self.violation("work goes on", what));
        }
        self.check(|checker| checker.ended(&stats))?;
        let may_be_lost = self.totals.num_undrawn > 0;
        let verdict = self.kept.check(&mut self.scheduler, may_be_lost);
        verdict.map_err(|what| self.violation("what is pinned is kept", what))
    }

    fn call(&mut self, index: usize) -> Result<(), Violation> {
        let workload = self.workload;
        let answers = &workload.calls[index].answers;
        self.totals.num_requests += answers.len() as u64;
        let requests: Vec<Request> = answers.iter().map(|a| a.request.clone()).collect();
        let before = self.scheduler.stats();
        let num_waiting = before.num_waiting;
        let num_tokens: u64 = requests.iter().map(|r| r.prompt.len() as u64).sum();
        match self.scheduler.add_requests(requests) {
            Ok(()) => {
                let arrival_us = answers[0].request.arrival_us;
                self.totals.num_overtaken += u64::from(arrival_us < self.latest_arrival_us);
                self.latest_arrival_us = self.latest_arrival_us.max(arrival_us);
                for answer in answers {
                    self.answers.insert(answer.request.id, answer);
                    self.requests
                        .insert(answer.request.id, Progress::new(answer));
                    for checker in &mut self.checkers {
                        checker.queued(answer);
                    }
                }
                Ok(())
            }
            Err(error) => {
                self.totals.num_refused += answers.len() as u64;
                let is_right = match &error {
                    AdmissionError::QueueFull { limit, .. } => {
                        let limits = queue_limits(&workload.config, &before);
                        num_waiting + answers.len() > *limit as usize && limits.contains(limit)
                    }
                    AdmissionError::QueuedTokensFull { limit, .. } => {
                        before.num_queued_tokens > 0
                            && before.num_queued_tokens + num_tokens > *limit
                    }
                    AdmissionError::ObjectiveMissed(missed) => {
                        self.totals.num_refused_as_late += 1;
                        self.check(|checker| checker.refused(&answers[0], missed))?;
                        true
                    }
                    error => {
                        workload.config.check_request(&answers[0].request).as_ref() == Err(error)
                    }
                };
                if is_right && self.scheduler.stats().num_waiting == num_waiting {
                    return Ok(());
                }
                let what = format!(
                    "{} requests with {num_waiting} waiting: {error}",
                    answers.len()
                );
                Err(self.violation("all of a call is queued or none", what))
            }
        }
    }

    fn reset(&mut self) -> Result<(), Violation> {
        let stats = self.scheduler.stats();
        let num_in_use = stats.num_in_use_pages - stats.num_pinned_pages;
        let is_reset = self.scheduler.reset_prefix_cache().is_ok();
        self.totals.num_resets += u64::from(is_reset);
        self.totals.num_resets_past_pins += u64::from(is_reset && stats.num_pinned_pages > 0);
        let num_cached = self.scheduler.stats().num_cached_pages;
        if is_reset == (num_in_use == 0) && !(is_reset && num_cached > 0) {
            return Ok(());
        }
        let what = format!("reset is {is_reset} with {num_in_use} pages in use");
        Err(self.violation("a reset is refused while pages are in use", what))
    }

    fn pin(&mut self, index: usize) -> Result<(), Violation> {
        let verdict = self
            .kept
            .pin(&mut self.scheduler, &self.workload.pins[index]);
        let is_pinned = verdict.map_err(|what| self.violation("pins are counted", what))?;
        self.totals.num_pins += u64::from(is_pinned);
        Ok(())
    }

    fn begin_fetch(&mut self, index: usize) {
        let plan = &self.workload.fetches[index];
        let (scheduler, executor) = (&mut self.scheduler, &mut self.executor);
        let begun = self.fetcher.begin(scheduler, executor, plan, self.now_us);
        if let Some((id, after_us)) = begun {
            self.push(self.now_us + after_us, Event::WriterActs(id));
        }
        let (scheduler, executor) = (&mut self.scheduler, &self.executor);
        let begun = self.reader.begin(scheduler, executor, plan, self.now_us);
        if let Some((id, after_us)) = begun {
            self.push(self.now_us + after_us, Event::ReaderEnds(id));
        }
    }

    fn act_as_writer(&mut self, id: FetchId) {
        let (scheduler, executor) = (&mut self.scheduler, &mut self.executor);
        if let Some(after_us) = self.fetcher.act(id, scheduler, executor) {
            self.push(self.now_us + after_us, Event::WriterActs(id));
        }
    }

    /// Drafts like a model that is right three times in four and sometimes drafts nothing.
    fn give_drafts(&mut self) {
        let random = &mut self.random;
        let mut given = Vec::new();
        for asked in self.scheduler.draft_requests() {
            let answer = self.answers[&asked.start.request];
            let num_drawn = asked.tokens.len() - answer.request.prompt.len();
            let coming = answer.output[num_drawn..].iter().copied();
            let guess = |token| token + u32::from(random.once_in(4));
            let num_drafts = asked.max_drafts as usize;
            let drafts: Vec<_> = coming.map(guess).take(num_drafts).collect();
            if !random.once_in(8) {
                given.push((asked.start.request, drafts));
            }
        }
        for (request, drafts) in given {
            self.scheduler.give_drafts(request, drafts);
        }
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), Violation> {
        let num_waiting = self.scheduler.stats().num_waiting;
        self.totals.num_row_copies += batch.copies.len() as u64;
        self.totals.num_snapshots += batch.snapshots.len() as u64;
        let restored = batch
            .started
            .iter()
            .filter(|start| start.snapshot.is_some());
        self.totals.num_restored_states += restored.count() as u64;
        self.note_slots(batch);
        let named = self.note_spans(batch, num_waiting)?;
        let step = Planned {
            batch,
            slots: &self.slots,
            prefilling: &self.prefilling,
            now_us: self.now_us,
            stats: self.scheduler.stats(),
        };
        let verdict = first_wrong(&mut self.checkers, |checker| checker.planned(&step));
        verdict.map_err(|(rule, what)| self.violation(rule, what))?;
        for span in batch.spans.iter().filter(|span| span.yields.draws()) {
            self.prefilling.remove(&span.slot);
        }

        let fails = match self.workload.fails_once_in {
            0 => false,
            times => self.random.once_in(times),
        };
        let undrawn = match self.workload.undrawn_once_in {
            0 => None,
            times if !fails && self.random.once_in(times) => {
                Some(self.random.below(batch.spans.len() as u64) as usize)
            }
            _ => None,
        };
        self.executor.submit(batch, fails, undrawn);
        self.inflight.push_back(Inflight {
            named,
            planned_us: self.now_us,
            num_tokens: batch.num_tokens() as u64,
        });
        let step_us = self.workload.cost.step_duration(batch).as_micros() as u64;
        // A step takes `step_us` in each stage.
        let num_stages = self.workload.config.num_pipeline_stages;
        let through_stages = self.now_us + step_us * u64::from(num_stages);
        self.last_return_us = through_stages.max(self.last_return_us + step_us);
        let waits = |token: &InputToken| matches!(token, InputToken::FromStep { .. });
        if num_stages > 1 && batch.tokens.iter().any(waits) {
            let what = format!(
                "step {} needs a token that a step in flight draws",
                batch.step
            );
            return Err(self.violation("a pipeline is given known tokens", what));
        }
        self.push(self.last_return_us, Event::StepReturns);
        Ok(())
    }

    /// Updates the slots that the step releases and starts, and the slots whose prompt is not complete.
    fn note_slots(&mut self, batch: &Batch) {
        for slot in &batch.released {
            self.prefilling.remove(slot);
            if let Some(id) = self.slots.remove(slot)
                && let Some(progress) = self.requests.get_mut(&id)
            {
                progress.has_slot = false;
            }
        }
        let mut unclear = Vec::new();
        for start in &batch.started {
            self.slots.insert(start.slot, start.request);
            let deltas = batch.tables.iter().filter(|delta| delta.slot == start.slot);
            let ranges = deltas.map(|delta| delta.pages.start as usize..delta.pages.end as usize);
            let table: Vec<_> = ranges
                .flat_map(|range| &batch.pages[range])
                .copied()
                .collect();
            match self.host.take_restored(start.request, &table) {
                Some(true) => {}
                Some(false) => {
                    self.prefilling.insert(start.slot);
                }
                None => unclear.push(start.slot),
            }
            let progress = self
                .requests
                .get_mut(&start.request)
                .expect("a step or an output names an unknown request");
            progress.has_slot = true;
            progress.was_started = true;
        }
        // If the step already has `max_decode_seqs` decodes, the span belongs to a prompt.
        for slot in unclear {
            let is_decode = |span: &&Span| !self.prefilling.contains(&span.slot);
            let num_decodes = batch.spans.iter().filter(is_decode).count();
            if num_decodes > self.workload.config.max_decode_seqs as usize {
                self.prefilling.insert(slot);
            }
        }
    }

    /// Updates the row counts of the requests in a step. Returns these requests.
    fn note_spans(
        &mut self,
        batch: &Batch,
        num_waiting: usize,
    ) -> Result<BTreeSet<RequestId>, Violation> {
        let config = &self.workload.config;
        let threshold = config.long_prefill_token_threshold as usize;
        let mut named = BTreeSet::new();
        for span in &batch.spans {
            let id = self.slots[&span.slot];
            named.insert(id);
            let is_prefill = self.prefilling.contains(&span.slot);
            let is_long = threshold > 0 && is_prefill && span.tokens.len() > threshold;
            let has_waiting =
                config.enable_prefix_caching && !span.yields.draws() && num_waiting > 0;
            self.totals.num_long_chunks += u64::from(is_long && has_waiting);
            let progress = self
                .requests
                .get_mut(&id)
                .expect("a step or an output names an unknown request");
            progress.has_drafts = span.num_drafts > 0;
            progress.num_rows = span.start + span.tokens.len() as u32 - span.num_drafts;
            if !span.yields.draws() || progress.num_rows >= progress.num_prompt_tokens {
                continue;
            }
            let what = format!("request {id} draws after row {}", progress.num_rows);
            return Err(self.violation("a middle chunk draws nothing", what));
        }
        Ok(named)
    }

    fn return_step(&mut self) -> Result<(), Violation> {
        let returned = self
            .inflight
            .pop_front()
            .expect("a step returns while none is in flight");
        let elapsed_us = self.now_us - returned.planned_us;
        for checker in &mut self.checkers {
            checker.returned(returned.num_tokens, elapsed_us);
        }
        match self.executor.wait() {
            Returned::Output(output, undrawn) => {
                self.totals.num_undrawn += undrawn.len() as u64;
                for checker in &mut self.checkers {
                    checker.step_failed(&undrawn);
                }
                self.scheduler.update_from_output(&output);
            }
            Returned::Failed(step, requests) => {
                self.totals.num_failed_steps += 1;
                for checker in &mut self.checkers {
                    checker.step_failed(&requests);
                }
                self.scheduler.handle_step_failed(step, "injected");
            }
        }
        Ok(())
    }

    /// Takes the scheduler's outputs, aborts the requests that have reached their station, and runs all checks.
    fn settle(&mut self) -> Result<(), Violation> {
        self.take_outputs()?;
        self.abort_at_stations()?;
        self.take_outputs()?;
        if self.random.once_in(4) {
            self.hear()?;
        }
        let stats = self.scheduler.stats();
        self.check(|checker| checker.settled(&stats))?;
        let share = stats.head_room_share;
        self.totals.num_raised_shares += u64::from(share > self.head_room_share);
        self.totals.num_lowered_shares += u64::from(share < self.head_room_share);
        self.head_room_share = share;
        self.scheduler.check_invariants();
        Ok(())
    }

    fn take_outputs(&mut self) -> Result<(), Violation> {
        while let Some(output) = self.scheduler.poll_output() {
            let now_us = self.now_us;
            self.check(|checker| checker.told(&output, now_us))?;
            let progress = self
                .requests
                .get_mut(&output.request)
                .expect("a step or an output names an unknown request");
            progress.num_seen = output.num_output_tokens;
            progress.has_ended = output.finish.is_some();
            self.totals.num_prompt_logprobs += output.prompt_logprobs.len() as u64;
            self.totals.num_hidden_states += u64::from(output.hidden_state.is_some());
            if let Some(finish) = &output.finish {
                self.count_end(&output, finish);
            }
        }
        Ok(())
    }

    fn count_end(&mut self, output: &RequestOutput, finish: &FinishReason) {
        use corella_core::FinishReason::{Aborted, EndToken, Error, Length, StopToken};
        let totals = &mut self.totals;
        match finish {
            EndToken | StopToken | Length => totals.num_completed += 1,
            Error(RequestError::ObjectiveMissed(_)) => totals.num_dropped_as_late += 1,
            Aborted | Error(_) => {}
        }
        let request = &self.answers[&output.request].request;
        totals.num_without_limit += u64::from(request.stopping.max_tokens.is_none());
        let is_scored_only = request.stopping.max_tokens == Some(0);
        totals.num_retained += u64::from(output.cache_use.num_retained_tokens > 0);
        totals.num_scored_only += u64::from(is_scored_only && *finish == Length);
        if request.namespace.lora.is_some() {
            totals.num_adapter_hit_tokens += u64::from(output.cache_use.num_cached_tokens);
        }
    }

    fn hear(&mut self) -> Result<(), Violation> {
        while let Some(event) = self.scheduler.poll_kv_event() {
            self.totals.num_kv_events += 1;
            let is_right = match &event {
                KvEvent::Cleared => {
                    self.heard.clear();
                    true
                }
                KvEvent::Stored { page, parent, .. } => {
                    // With a window or a snapshot, a block can be hit although the one before it is gone.
                    let has_parent = parent.is_none_or(|parent| self.heard.contains(&parent))
                        || self.workload.config.has_windows()
                        || self.workload.config.recurrent_state.is_some();
                    self.heard.insert(*page) && has_parent
                }
                KvEvent::Removed { page } => self.heard.remove(page),
            };
            if !is_right {
                let what = format!("{event:?}");
                return Err(self.violation("KV events follow from those before", what));
            }
        }
        let stats = self.scheduler.stats();
        let num_pages = stats.num_cached_pages + stats.num_in_use_pages;
        // With windows of one token, a cached prefix may have no page.
        if self.heard.len() <= num_pages || self.workload.config.has_windows() {
            return Ok(());
        }
        let what = format!("{} pages are announced: {stats:?}", self.heard.len());
        Err(self.violation("announced pages exist", what))
    }

    fn abort_at_stations(&mut self) -> Result<(), Violation> {
        let inflight = &self.inflight;
        let there: Vec<(RequestId, Station)> = self
            .requests
            .iter()
            .filter_map(|(&id, progress)| {
                let station = progress.abort?;
                let in_flight = inflight.iter().any(|step| step.named.contains(&id));
                progress.is_at(station, in_flight).then_some((id, station))
            })
            .collect();
        for (id, station) in there {
            let progress = self
                .requests
                .get_mut(&id)
                .expect("a request that was just seen is gone");
            progress.abort = None;
            let has_ended = progress.has_ended;
            self.totals.count_abort(station);
            if !has_ended {
                for checker in &mut self.checkers {
                    checker.aborted(id);
                }
            }
            let is_aborted = self.scheduler.abort_request(id);
            let again = self.scheduler.abort_request(id);
            if is_aborted == has_ended || again {
                let what = format!("request {id} at {station:?}: {is_aborted}, again: {again}");
                return Err(self.violation("an abort takes effect once", what));
            }
        }
        Ok(())
    }

    fn check(&mut self, look: impl FnMut(&mut dyn Checker) -> Verdict) -> Result<(), Violation> {
        let verdict = first_wrong(&mut self.checkers, look);
        verdict.map_err(|(rule, what)| self.violation(rule, what))
    }

    fn violation(&self, rule: &'static str, what: String) -> Violation {
        Violation {
            at_us: self.now_us,
            rule,
            what,
        }
    }
}

fn first_wrong(
    checkers: &mut [Box<dyn Checker>],
    mut look: impl FnMut(&mut dyn Checker) -> Verdict,
) -> Result<(), (&'static str, String)> {
    for checker in checkers {
        look(checker.as_mut()).map_err(|what| (checker.rule(), what))?;
    }
    Ok(())
}

/// The possible limits of the queue. If no request waits and no step is in flight, all free slots count.
fn queue_limits(config: &SchedulerConfig, stats: &SchedulerStats) -> RangeInclusive<u32> {
    let most = config.max_queued_requests + config.max_num_seqs - stats.num_running as u32;
    match stats.num_waiting + stats.num_inflight_steps {
        0 => most..=most,
        _ => config.max_queued_requests..=most,
    }
}
