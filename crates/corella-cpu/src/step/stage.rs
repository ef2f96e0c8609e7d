//! A stage of the pipeline: its layers, its threads, its share of the KV pages. Without a pipeline, one stage is first
//! and last.
//!
//! Commands enter at the first stage and pass through all stages in order. Each stage keeps its own account of slots
//! and pages from the same batches. Only rows of the residual stream go from one stage to the next, and only drawn
//! tokens from the last stage to the first. A step that fails in one stage fails in all of them, and no other step
//! fails.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use corella_core::{Batch, BatchOutput, InputToken, PageId, Sample, SlotId, StepId, TokenId};
use corella_model::{
    CallerWaker, DraftSlot, ExecutorError, NOTHING_DRAWN, PageTable, Sampler, Slots, StepCommand,
    StepOutput, StepPool, StepResult, StepSample, StepScore, TokenMask,
};

use crate::kv::PageCommit;
use crate::system::{StepTurn, ThreadPool, Worker};
use crate::weights::PackedAdapter;

use super::draft_head::DraftHead;
use super::forward::{Forward, Incoming};
use super::layout::StepLayout;
use super::profile::barrier_after;
use super::profile::{Operation, Walk};

mod drafting;
mod pooling;
mod scoring;

pub enum Command {
    Step {
        batch: Arc<Batch>,
        /// The residual stream of the previous stage, `[rows][hidden_size]`, or the reason for its absence.
        rows: Result<Vec<f32>, String>,
    },
    Sample(StepId, Vec<TokenMask>),
    Drawn(Drawn),
    Draft(Vec<DraftSlot>, SyncSender<Drafted>),
    WarmUp(SyncSender<Result<(), String>>),
    Close,
}

impl StepCommand for Command {
    fn warm_up(reply: SyncSender<Result<(), String>>) -> Self {
        Self::WarmUp(reply)
    }

    fn close() -> Self {
        Self::Close
    }
}

/// The guesses for slots, or the reason for their absence.
pub type Drafted = Result<Vec<(SlotId, Vec<Sample>)>, String>;

/// The draws of a step, for the stage that embeds them; `None` when it failed.
pub struct Drawn {
    step: StepId,
    tokens: Option<Vec<(SlotId, TokenId)>>,
}

/// The receiver of a stage's work.
pub enum Output {
    Next(SyncSender<Command>),
    Caller {
        results: SyncSender<StepResult>,
        /// Declared after `results`, so dropped after it: when this stage ends, the woken caller finds `results`
        /// closed.
        waker: CallerWaker,
        /// The input of the first stage, which has to know the draws. `None` if this stage is also the first one.
        first: Option<SyncSender<Command>>,
    },
}

/// A stage, which runs in a thread of its own. That thread is also worker 0 of its pool.
pub struct Stage {
    forward: Forward,
    draft_head: Option<DraftHead>,
    pool: ThreadPool,
    slots: Slots<PackedAdapter>,
    max_num_batched_tokens: u32,
    commands: Receiver<Command>,
    output: Output,
    turn: Option<StepTurn>,
    plan: StepLayout,
    /// The samplers of the workers.
    samplers: Vec<Mutex<Sampler>>,
    /// Commands that arrived while a step waited.
    postponed: VecDeque<Command>,
    /// In the first stage, the newest step whose draws have arrived from the last stage.
    newest_drawn: Option<StepId>,
    /// The step that this stage computed last.
    previous_step: Option<StepId>,
    /// Commits the memory of its KV pages ahead of use.
    commit: Option<PageCommit>,
}

/// A stage without commands for this time is idle.
const IDLE: Duration = Duration::from_millis(20);

/// The rest of the pipeline has ended, or is about to end.
struct Closed;

impl Stage {
    pub fn new(
        (forward, draft_head): (Forward, Option<DraftHead>),
        pool: ThreadPool,
        slots: Slots<PackedAdapter>,
        max_num_batched_tokens: u32,
        (commands, output): (Receiver<Command>, Output),
        turn: Option<StepTurn>,
    ) -> Self {
        Self {
            commit: forward.kv.page_commit(),
            forward,
            draft_head,
            samplers: (0..pool.num_threads()).map(|_| Mutex::default()).collect(),
            pool,
            slots,
            max_num_batched_tokens,
            commands,
            output,
            turn,
            plan: StepLayout::default(),
            postponed: VecDeque::new(),
            newest_drawn: None,
            previous_step: None,
        }
    }

    /// Handles commands in the calling thread until the pipeline is closed.
    pub fn run(mut self) {
        self.pool.pin_caller();
        while let Some(command) = self.next_command() {
            if self.handle(command).is_err() {
                return;
            }
        }
    }

    fn next_command(&mut self) -> Option<Command> {
        if let Some(postponed) = self.postponed.pop_front() {
            return Some(postponed);
        }
        let mut patience = IDLE;
        while let Some(bytes) = self.next_commit() {
            match self.commands.recv_timeout(patience) {
                Ok(command) => return Some(command),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    let is_ready = self.forward.kv.commit(bytes);
                    if let Some(commit) = &mut self.commit {
                        commit.finish_next(is_ready);
                    }
                    patience = Duration::ZERO;
                }
            }
        }
        self.commands.recv().ok()
    }

    /// The memory to commit next: a few milliseconds' worth of the next pages.
    fn next_commit(&mut self) -> Option<Range<usize>> {
        let commit = self.commit.as_mut()?;
        commit.note_used(self.forward.kv.num_used());
        commit.next()
    }

    fn handle(&mut self, command: Command) -> Result<(), Closed> {
        match command {
            Command::Step { batch, rows } => self.step(batch, rows),
            // The last stage gets here only with masks of a step that drew no token or failed before its draws.
            Command::Sample(..) => self.pass_on(command),
            Command::Drawn(drawn) => {
                self.take_drawn(drawn);
                Ok(())
            }
            // A draft takes no turn, because the engine's loop waits for it, and must not wait for another model's
            // prefill. Sending fails only if the caller no longer waits.
            Command::Draft(asked, reply) => {
                let drafted = without_panic(|| self.draft(&asked));
                let _ = reply.send(drafted);
                Ok(())
            }
            Command::WarmUp(reply) => match self.warm_up() {
                Ok(()) if matches!(self.output, Output::Next(_)) => {
                    self.pass_on(Command::WarmUp(reply))
                }
                result => {
                    let _ = reply.send(result);
                    Ok(())
                }
            },
            Command::Close => {
                let _ = self.pass_on(Command::Close);
                Err(Closed)
            }
        }
    }

    /// Sends a command to the next stage; the last one has none, and drops it.
    fn pass_on(&self, command: Command) -> Result<(), Closed> {
        match &self.output {
            Output::Next(next) => next.send(command).map_err(|_| Closed),
            Output::Caller { .. } => Ok(()),
        }
    }

    fn step(&mut self, batch: Arc<Batch>, rows: Result<Vec<f32>, String>) -> Result<(), Closed> {
        self.begin_turn();
        let start = self.forward.profile.as_ref().map(|_| Instant::now());
        let computed = without_panic(|| self.compute(&batch, rows));
        self.previous_step = Some(batch.step);
        self.forward.kv.counter.finish(batch.step);
        if computed.is_err() {
            self.slots.handle_step_failed(&batch);
        }
        match &self.output {
            Output::Next(next) => {
                let command = Command::Step {
                    batch,
                    rows: computed,
                };
                next.send(command).map_err(|_| Closed)
            }
            Output::Caller { .. } => {
                let result = computed.and_then(|_| self.draw_step(&batch));
                self.end_turn();
                if let (Some(profile), Some(start)) = (&self.forward.profile, start) {
                    profile.add_step(self.plan.is_prefill(), start.elapsed());
                }
                self.answer(&batch, result)
            }
        }
    }

    fn begin_turn(&mut self) {
        if let Some(turn) = &mut self.turn {
            turn.begin();
        }
    }

    fn end_turn(&mut self) {
        if let Some(turn) = &mut self.turn {
            turn.end();
        }
    }

    /// Returns the rows for the next stage, if any.
    fn compute(
        &mut self,
        batch: &Batch,
        rows: Result<Vec<f32>, String>,
    ) -> Result<Vec<f32>, String> {
        if self.is_first() && !self.is_last() {
            self.wait_for_drawn(batch)?;
        }
        // The slots change even if an earlier stage has failed, because later steps build on them.
        let applied = self.slots.apply(batch);
        let applied = applied.and(self.plan_states(batch));
        if let Some(head) = &mut self.draft_head {
            head.start(batch);
        }
        let rows = rows?;
        applied?;
        self.copy_pages(batch)?;
        self.plan
            .add_spans(batch, &mut self.slots, self.max_num_batched_tokens)?;
        self.check_whole()?;
        for page in self.plan.spans.last_pages() {
            self.forward.kv.note_used(page.0 as usize);
        }
        self.run_layers(&rows)?;
        self.follow_with_draft_head(batch)?;
        self.forward.ends().check_files()?;
        if let Some(states) = &mut self.forward.states {
            states.keep(batch)?;
        }
        match self.is_last() {
            true => Ok(Vec::new()),
            false => Ok(self.forward.outgoing(self.plan.rows.rows.len(), rows)),
        }
    }

    /// Begins the recurrent states of starting slots, and plans the states of all spans. States advance even if the
    /// step fails, as histories do.
    fn plan_states(&mut self, batch: &Batch) -> Result<(), String> {
        self.plan.clear();
        let Some(states) = &mut self.forward.states else {
            return Ok(());
        };
        let mut result = states.start(batch);
        for span in &batch.spans {
            match states.plan(span) {
                Ok(state) => self.plan.states.push(state),
                Err(problem) => result = result.and(Err(problem)),
            }
        }
        result.and(states.plan_snapshots(batch))
    }

    /// Refuses parts of texts for an encoder: its layers share the memory of keys and values, so that a later part
    /// would find no keys and values of earlier parts.
    fn check_whole(&self) -> Result<(), String> {
        let is_encoder = self.forward.spec().encoder.is_some();
        match is_encoder && self.plan.spans.iter().any(|span| span.start > 0) {
            true => Err(String::from(
                "an encoder reads whole texts, but a span has only a part of its text",
            )),
            false => Ok(()),
        }
    }

    fn is_first(&self) -> bool {
        self.forward.first_layer == 0
    }

    fn is_last(&self) -> bool {
        matches!(self.output, Output::Caller { .. })
    }

    fn draw_step(&mut self, batch: &Batch) -> Result<BatchOutput, String> {
        let samples = std::mem::take(&mut self.plan.rows.samples);
        let scores = std::mem::take(&mut self.plan.rows.scores);
        let pooled = std::mem::take(&mut self.plan.rows.pooled);
        let drawn = without_panic(|| self.draw(batch.step, &samples, (&scores, &pooled)));
        (self.plan.rows.samples, self.plan.rows.scores) = (samples, scores);
        self.plan.rows.pooled = pooled;
        if drawn.is_err() {
            self.slots.handle_step_failed(batch);
        }
        drawn
    }

    fn answer(&mut self, batch: &Batch, result: Result<BatchOutput, String>) -> Result<(), Closed> {
        let Output::Caller {
            results,
            waker,
            first,
        } = &self.output
        else {
            return Ok(());
        };
        let step = batch.step;
        if let Some(first) = first {
            let drawn = |output: &BatchOutput| {
                let samples = output.samples.iter();
                let undrawn = output
                    .undrawn
                    .iter()
                    .map(|(slot, _)| (*slot, NOTHING_DRAWN));
                samples
                    .map(|(slot, sample)| (*slot, sample.token))
                    .chain(undrawn)
                    .collect()
            };
            let tokens = result.as_ref().ok().map(drawn);
            first
                .send(Command::Drawn(Drawn { step, tokens }))
                .map_err(|_| Closed)?;
        }
        let result = result.map_err(|reason| match self.forward.ends().check_files() {
            Ok(()) => ExecutorError::StepFailed { step, reason },
            Err(reason) => ExecutorError::Lost { reason },
        });
        results.send(result).map_err(|_| Closed)?;
        waker.wake();
        Ok(())
    }

    fn copy_pages(&mut self, batch: &Batch) -> Result<(), String> {
        let kv = &self.forward.kv;
        for copy in &batch.copies {
            let (from, to) = (copy.from.0 as usize, copy.to.0 as usize);
            // The last page is for warm-up.
            if from.max(to) + 1 >= kv.num_pages() || copy.num_rows as usize > kv.page_size() {
                return Err(format!("impossible copy: {copy:?}"));
            }
            // SAFETY: the workers wait; by the contract of `KvPages`, other threads at most read the source page, and
            // do not use the target.
            unsafe { kv.copy_rows(from, to, copy.num_rows as usize) };
        }
        if let Some(head) = &mut self.draft_head {
            head.copy_rows(batch);
        }
        Ok(())
    }

    fn run_layers(&mut self, rows: &[f32]) -> Result<(), String> {
        if self.plan.rows.rows.is_empty() {
            return Ok(());
        }
        self.forward.divide(&mut self.plan);
        let incoming = match self.is_first() {
            true => Incoming::Tokens,
            false => Incoming::Rows(rows),
        };
        let (forward, plan) = (&self.forward, &self.plan);
        self.pool
            .run(&|worker| forward.layers(plan, incoming, worker))
    }

    /// Draws from logits that are computed block by block, so that their memory does not grow with the step. The first
    /// block is computed before waiting for the masks. All rows of a block are drawn at once, including rows after
    /// drafts. Then the draws that count are selected.
    fn draw(
        &mut self,
        step: StepId,
        samples: &[StepSample],
        (scores, pooled): (&[StepScore], &[StepPool]),
    ) -> Result<BatchOutput, String> {
        let mut output = StepOutput::new(step, samples.len());
        self.score(scores, &mut output)?;
        self.pool_hidden_states(pooled, &mut output)?;
        let mut masks = None;
        for block in samples.chunks(self.forward.logit_rows()) {
            let rows: Vec<usize> = block.iter().map(|sample| sample.row).collect();
            self.compute_logits(&rows)?;
            if masks.is_none() {
                masks = Some(self.wait_for_masks(step)?);
            }
            let masks = masks.as_deref().unwrap_or_default();
            let is_prefill = self.plan.is_prefill();
            let drawn = draw_block(
                (&mut self.pool, &self.samplers),
                (&self.forward, is_prefill),
                &self.slots,
                block,
                masks,
            )?;
            for (place, drawn) in block.iter().zip(drawn) {
                let is_masked = masks.iter().any(|mask| mask.slot == place.slot);
                if let Some(token) = output.add_draw(place, drawn, is_masked) {
                    self.slots.get_mut(place.slot)?.set_drawn(step, token);
                }
            }
        }
        Ok(output.finish())
    }

    /// Computes the logits of at most `logit_rows` rows.
    fn compute_logits(&mut self, rows: &[usize]) -> Result<(), String> {
        let (forward, plan) = (&self.forward, &self.plan);
        self.pool.run(&|worker| forward.logits(plan, rows, worker))
    }

    fn take_drawn(&mut self, Drawn { step, tokens }: Drawn) {
        self.newest_drawn = Some(step);
        match tokens {
            None => self.slots.note_failed(step),
            Some(tokens) => {
                for (slot, token) in tokens {
                    // The request may have given up its slot meanwhile.
                    if let Ok(slot) = self.slots.get_mut(slot) {
                        slot.set_drawn(step, token);
                    }
                }
            }
        }
    }

    /// Waits until the last stage has drawn the tokens that the batch embeds.
    fn wait_for_drawn(&mut self, batch: &Batch) -> Result<(), String> {
        let needed = batch.tokens.iter().filter_map(|input| match input {
            InputToken::Known(_) => None,
            InputToken::FromStep { step, .. } => Some(*step),
        });
        // An unsubmitted step draws no token.
        let needed = needed.max().min(self.previous_step);
        if self.newest_drawn < needed {
            self.pass_on_postponed_masks(batch.step);
        }
        while self.newest_drawn < needed {
            if self.is_closing() {
                return Err(String::from("the executor was dropped"));
            }
            match self.commands.recv() {
                Ok(Command::Drawn(drawn)) => self.take_drawn(drawn),
                // The awaited step may wait for these masks. Masks of later steps wait in the queue after their steps.
                Ok(Command::Sample(step, masks)) if step < batch.step => {
                    let _ = self.pass_on(Command::Sample(step, masks));
                }
                Ok(Command::Close) | Err(_) => self.postponed.push_back(Command::Close),
                Ok(command) => self.postponed.push_back(command),
            }
        }
        Ok(())
    }

    /// Whether the input is closed. Postponed steps then fail.
    fn is_closing(&self) -> bool {
        let mut postponed = self.postponed.iter();
        postponed.any(|command| matches!(command, Command::Close))
    }

    /// Passes on masks of steps before `step`, because the awaited step may wait for them.
    fn pass_on_postponed_masks(&mut self, step: StepId) {
        for command in std::mem::take(&mut self.postponed) {
            match command {
                Command::Sample(s, masks) if s < step => {
                    let _ = self.pass_on(Command::Sample(s, masks));
                }
                command => self.postponed.push_back(command),
            }
        }
    }

    fn wait_for_masks(&mut self, step: StepId) -> Result<Vec<TokenMask>, String> {
        let is_it = |command: &Command| matches!(command, Command::Sample(s, _) if *s == step);
        if let Some(index) = self.postponed.iter().position(is_it)
            && let Some(Command::Sample(_, masks)) = self.postponed.remove(index)
        {
            return Ok(masks);
        }
        while !self.is_closing() {
            let command = match self.commands.try_recv() {
                Err(TryRecvError::Empty) => {
                    // Others compute while the masks are being made.
                    self.end_turn();
                    let command = self.commands.recv();
                    self.begin_turn();
                    command
                }
                received => received.map_err(|_| RecvError),
            };
            match command {
                Ok(Command::Sample(s, masks)) if s == step => return Ok(masks),
                Ok(Command::Close) | Err(_) => self.postponed.push_back(Command::Close),
                Ok(command) => self.postponed.push_back(command),
            }
        }
        Err(String::from("the executor was dropped"))
    }

    /// Computes a step of one row and a step of several tiles, on a page that no request has. No profile counts these
    /// steps.
    fn warm_up(&mut self) -> Result<(), String> {
        let profile = self.forward.profile.take();
        let result = self.run_warm_up();
        self.forward.profile = profile;
        result
    }

    fn run_warm_up(&mut self) -> Result<(), String> {
        let page = PageId(self.forward.kv.num_pages() as u32 - 1);
        let max_rows = (self.forward.tile_rows() + 1)
            .min(self.forward.kv.page_size())
            .min(self.max_num_batched_tokens as usize);
        for num_rows in [1, max_rows] {
            let rows = vec![0.0; num_rows * self.forward.spec().hidden_size];
            self.plan.clear();
            let num_groups = self.slots.limits().kv_groups.len();
            let table = PageTable::new(0, std::slice::from_ref(&page));
            let tables = std::iter::repeat_n(table, num_groups);
            self.plan.add_span(&vec![0; num_rows], 0, tables);
            if let Some(states) = &mut self.forward.states {
                self.plan.states.push(states.plan_warm_up(num_rows)?);
            }
            self.run_layers(&rows)?;
            if self.is_last() {
                self.compute_logits(&[0])?;
            }
        }
        Ok(())
    }
}

/// However a stage ends, all waits for its steps end.
impl Drop for Stage {
    fn drop(&mut self) {
        self.forward.kv.counter.close();
    }
}

/// Draws from the logits of a block of rows.
fn draw_block(
    (pool, samplers): (&mut ThreadPool, &[Mutex<Sampler>]),
    (forward, is_prefill): (&Forward, bool),
    slots: &Slots<PackedAdapter>,
    block: &[StepSample],
    masks: &[TokenMask],
) -> Result<Vec<Result<Sample, String>>, String> {
    let draw = |worker: &Worker<'_>, index: usize| {
        let id = block[index].slot;
        let mask = masks.iter().find(|mask| mask.slot == id);
        let allowed = mask.map(|mask| &*mask.allowed);
        let request = slots
            .get(id)?
            .sample_request(block[index].num_tokens, allowed);
        // SAFETY: each index is drawn by one worker.
        let logits = unsafe { forward.logits_mut(index) };
        // Each sampler is locked only by its worker.
        let sampler = samplers[worker.index()].lock();
        let mut sampler = sampler.unwrap_or_else(PoisonError::into_inner);
        let sampled = sampler.sample(logits, request);
        sampled.map_err(|error| error.to_string())
    };
    on_rows(pool, forward, is_prefill, block.len(), draw)
}

/// Does `work` for each of `num_rows` rows of logits, divided among the workers.
fn on_rows<T: Send>(
    pool: &mut ThreadPool,
    forward: &Forward,
    is_prefill: bool,
    num_rows: usize,
    work: impl Fn(&Worker<'_>, usize) -> Result<T, String> + Sync,
) -> Result<Vec<Result<T, String>>, String> {
    let results: Vec<_> = (0..num_rows).map(|_| Mutex::new(None)).collect();
    let profile = forward.profile.as_deref();
    pool.run(&|worker| {
        let mut walk = Walk::new(worker, profile, is_prefill);
        for index in worker.share(num_rows) {
            let mut result = results[index]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *result = Some(work(worker, index));
        }
        barrier_after(Operation::Draw, &mut walk);
    })?;
    let results = results.into_iter().map(|result| {
        let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.unwrap_or_else(|| Err(String::from("a row was left out")))
    });
    Ok(results.collect())
}

/// Keeps the executor usable after a step with any panic.
fn without_panic<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let result = catch_unwind(AssertUnwindSafe(work));
    result.unwrap_or_else(|_| Err(String::from("the executor's code panicked")))
}
