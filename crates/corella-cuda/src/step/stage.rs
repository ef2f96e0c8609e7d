//! The thread that turns batches into work on the device's stream.
//!
//! Except for hidden states, it never waits for that work: a step's draws stay on the device, where the next step reads
//! them, and a second thread, in `completion`, waits for results. So steps follow each other on the device without a
//! gap.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use corella_core::{Batch, InputToken, PageId, PageTableDelta, Pooling, SlotId, StepId};
use corella_model::{
    DeviceError, ExecutorError, KvPages, Slots, SpanPool, StepCommand, StepOutput, StepRows,
    TokenMask,
};

use crate::device::Event;
use crate::kernels::sample::Draw;
use crate::kv::KvMemory;

use super::completion::{Completion, StepInFlight};
use super::forward::Forward;
use super::sampling::DeviceSampler;

pub enum Command {
    Step(Arc<Batch>),
    Sample(StepId, Vec<TokenMask>),
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

/// Adapters are not computed on GPUs yet, so slots never have one.
pub enum NoAdapter {}

/// The parts of the stage.
pub struct Stage {
    pub forward: Forward,
    pub sampler: DeviceSampler,
    pub slots: Slots<NoAdapter>,
    pub kv: Arc<KvMemory>,
    pub commands: Receiver<Command>,
    pub completions: SyncSender<Completion>,
    /// The memory of finished steps, for reuse.
    pub free_steps: Receiver<StepInFlight>,
    pub max_num_batched_tokens: u32,
    /// Commands that arrived while a step waited for its masks.
    pub postponed: VecDeque<Command>,
    pub rows: StepRows,
}

/// The reason for a step without a result.
enum StepError {
    /// The batch was impossible; the stage continues.
    Failed(String),
    /// The device is no longer usable.
    Lost(DeviceError),
    /// The executor was dropped.
    Closed,
}

impl From<String> for StepError {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

impl From<DeviceError> for StepError {
    fn from(error: DeviceError) -> Self {
        Self::Lost(error)
    }
}

impl Stage {
    /// Handles commands in the calling thread until the executor is dropped or the device is lost.
    pub fn run(mut self) {
        while let Some(command) = self.next_command() {
            match command {
                Command::Step(batch) => {
                    if !self.step(&batch) {
                        return;
                    }
                }
                // The step that these masks are for failed before it could draw.
                Command::Sample(..) => {}
                // If the caller no longer waits for the answer, sending fails, which is harmless.
                Command::WarmUp(reply) => {
                    let warmed_up = without_panic(|| Ok(self.warm_up()?));
                    let _ = reply.send(match warmed_up {
                        Ok(()) => Ok(()),
                        Err(StepError::Failed(reason)) => Err(reason),
                        Err(StepError::Lost(error)) => Err(error.to_string()),
                        Err(StepError::Closed) => Err(String::from("the executor was dropped")),
                    });
                }
                Command::Close => return,
            }
        }
    }

    fn next_command(&mut self) -> Option<Command> {
        let postponed = self.postponed.pop_front();
        postponed.or_else(|| self.commands.recv().ok())
    }

    /// Returns whether the stage continues.
    fn step(&mut self, batch: &Batch) -> bool {
        let step = batch.step;
        // The slots change even if the step fails, because later steps build on them.
        let applied = self.slots.apply(batch);
        let Ok(mut in_flight) = self.free_steps.recv() else {
            return false;
        };
        let launched = without_panic(|| self.launch(batch, applied, &mut in_flight));
        let completion = match launched {
            Ok((event, output)) => Completion::Step {
                step,
                event,
                output,
                in_flight,
            },
            Err(StepError::Failed(reason)) => {
                self.slots.handle_step_failed(batch);
                Completion::Failed {
                    error: ExecutorError::StepFailed { step, reason },
                    in_flight,
                }
            }
            Err(StepError::Lost(error)) => {
                let reason = error.to_string();
                let error = ExecutorError::Lost { reason };
                let _ = self
                    .completions
                    .send(Completion::Failed { error, in_flight });
                return false;
            }
            Err(StepError::Closed) => {
                // The device may still read the memory of the step.
                let _ = self.forward.synchronize();
                return false;
            }
        };
        self.completions.send(completion).is_ok()
    }

    /// Submits all work of a step to the device. Returns an event after this work, and the part of the output that is
    /// known.
    fn launch(
        &mut self,
        batch: &Batch,
        applied: Result<(), String>,
        in_flight: &mut StepInFlight,
    ) -> Result<(Event, StepOutput), StepError> {
        in_flight.clear();
        self.kv.check()?;
        for start in &batch.started {
            // A start that the slots refused does not concern the device.
            if self.slots.get(start.slot).is_ok() && self.sampler.has_room_for(&start.sampling) {
                self.sampler.start_slot(&mut in_flight.sampling, start)?;
            }
        }
        // Entries that the slots refused would be written beyond the tables.
        let limits = self.slots.limits();
        let is_possible = |delta: &PageTableDelta| {
            (delta.group.0 as usize) < limits.kv_groups.len()
                && self.slots.get(delta.slot).is_ok()
                && batch
                    .delta_pages(delta)
                    .iter()
                    .all(|page| page.0 < limits.num_pages)
        };
        self.forward.change_tables(batch, is_possible, in_flight)?;
        applied?;
        self.check_logprobs(batch)?;
        self.check_copies(batch)?;
        self.forward.copy_pages(batch, in_flight)?;
        self.add_rows(batch)?;
        let (rows, forward) = (&self.rows, &mut self.forward);
        forward.layers(Some(batch.step), rows, in_flight)?;
        let mut output = StepOutput::new(batch.step, rows.samples.len());
        self.pool_hidden_states(&mut output, in_flight)?;
        self.draw(batch.step, in_flight)?;
        Ok((self.forward.record()?, output))
    }

    fn check_logprobs(&self, batch: &Batch) -> Result<(), String> {
        let mut started = batch.started.iter();
        match started.find(|start| !self.sampler.has_room_for(&start.sampling)) {
            Some(start) => Err(format!(
                "slot {} wants the log-probabilities of more alternatives than this executor has \
                 memory for",
                start.slot
            )),
            None => Ok(()),
        }
    }

    fn check_copies(&self, batch: &Batch) -> Result<(), String> {
        let geometry = self.kv.geometry();
        let is_possible = |page: PageId| page.0 < geometry.num_pages;
        let impossible = batch.copies.iter().find(|copy| {
            !is_possible(copy.from) || !is_possible(copy.to) || copy.num_rows > geometry.page_size
        });
        match impossible {
            Some(copy) => Err(format!("impossible copy: {copy:?}")),
            None => Ok(()),
        }
    }

    /// Plans the rows of a batch, here and in the device's arrays.
    fn add_rows(&mut self, batch: &Batch) -> Result<(), String> {
        self.rows.clear();
        self.forward.arrays.clear();
        let arrays = &mut self.forward.arrays;
        let max_num_rows = self.max_num_batched_tokens;
        self.rows
            .add_spans(batch, &mut self.slots, max_num_rows, |_, span, _| {
                let tokens = batch.span_tokens(span).iter().map(|token| match *token {
                    InputToken::Known(token) => token as i32,
                    // The device itself reads the slot's draw.
                    InputToken::FromStep { .. } => -1,
                });
                arrays.add_span(span.slot, span.start as usize, tokens);
            })
    }

    /// Adds the hidden states of spans to a step's output. Waits for the step, so that its rows can be added to the
    /// sums of their slots in the order of steps.
    fn pool_hidden_states(
        &mut self,
        output: &mut StepOutput,
        in_flight: &mut StepInFlight,
    ) -> Result<(), StepError> {
        let rows = self.rows.pooled.iter();
        let rows: Vec<_> = rows.flat_map(|span| span.rows.clone()).collect();
        if rows.is_empty() {
            return Ok(());
        }
        let states = self.forward.hidden_states(&rows, in_flight)?;
        let len = self.forward.spec().hidden_size;
        let mut states = states.chunks(len);
        for span in &self.rows.pooled {
            let slot = self.slots.get_mut(span.slot)?;
            let pooling = span.yields.unwrap_or(Pooling::Mean);
            let mut pool = SpanPool::new(pooling);
            for (position, state) in (span.position..).zip(states.by_ref().take(span.rows.len())) {
                match pooling {
                    Pooling::Mean => slot.mean.add(position, state),
                    _ => pool.add(position, state),
                }
            }
            let pooled = match span.yields {
                None => continue,
                Some(Pooling::Mean) => slot.mean.mean(span.position + span.rows.len()),
                Some(_) => pool.pooled(),
            };
            output.add_hidden_state(span, pooled);
        }
        Ok(())
    }

    /// Draws and scores, block by block, so that the memory of logits does not grow with the step. Waits for the masks
    /// while the layers run.
    fn draw(&mut self, step: StepId, in_flight: &mut StepInFlight) -> Result<(), StepError> {
        let masks = match self.rows.samples.is_empty() {
            true => Vec::new(),
            false => self.wait_for_masks(step)?,
        };
        let Self {
            forward,
            sampler,
            rows,
            ..
        } = self;
        let logit_rows = forward.logit_rows();
        let sampling = &mut in_flight.sampling;
        for mask in &masks {
            sampler.set_mask(sampling, mask)?;
        }
        let scores = rows.scores.iter().map(|score| Draw {
            kind: Draw::SCORE,
            slot: score.slot.0,
            token: score.token,
            ..Draw::default()
        });
        let draws = rows.samples.iter().map(|sample| {
            let is_masked = masks.iter().any(|mask| mask.slot == sample.slot);
            let draw = Draw {
                kind: Draw::DRAW,
                slot: sample.slot.0,
                num_tokens: sample.num_tokens as u32,
                ..Draw::default()
            };
            { draw.flag(Draw::IS_MASKED, is_masked) }
                .flag(Draw::IS_BEHIND_DRAFT, sample.draft.is_some())
        });
        for (index, draw) in scores.chain(draws).enumerate() {
            let row = (index % logit_rows) as u32;
            sampler.plan(sampling, Draw { row, ..draw })?;
        }
        let num_draws = sampling.num_draws();
        let passes = sampling.passes();
        sampler.upload(sampling, num_draws)?;
        in_flight.scores.clone_from(&rows.scores);
        in_flight.samples.clone_from(&rows.samples);
        in_flight.masked.extend(masks.iter().map(|mask| mask.slot));
        for first in (0..num_draws).step_by(logit_rows) {
            let len = logit_rows.min(num_draws - first);
            let logits = forward.logits(first, len)?;
            // SAFETY: the rows of logits belong to these draws, and have no other use.
            unsafe { sampler.launch((first, len), passes, logits)? };
        }
        Ok(sampler.download(&mut in_flight.sampling)?)
    }

    fn wait_for_masks(&mut self, step: StepId) -> Result<Vec<TokenMask>, StepError> {
        let is_it = |command: &Command| matches!(command, Command::Sample(s, _) if *s == step);
        if let Some(index) = self.postponed.iter().position(is_it)
            && let Some(Command::Sample(_, masks)) = self.postponed.remove(index)
        {
            return Ok(masks);
        }
        loop {
            match self.commands.recv() {
                Ok(Command::Sample(s, masks)) if s == step => return Ok(masks),
                Ok(Command::Close) | Err(_) => return Err(StepError::Closed),
                Ok(command) => self.postponed.push_back(command),
            }
        }
    }

    /// Runs a step of one row and a step of several rows, on a slot and a page that belong to no request, and captures
    /// the graphs of decode steps.
    fn warm_up(&mut self) -> Result<(), DeviceError> {
        let Ok(mut in_flight) = self.free_steps.recv() else {
            return Ok(());
        };
        in_flight.clear();
        let slot = SlotId(self.slots.limits().max_num_seqs);
        let page = self.kv.geometry().num_pages;
        let max_rows = self
            .max_num_batched_tokens
            .min(self.kv.geometry().page_size);
        self.forward
            .warm_up(slot, page, max_rows as usize, &mut in_flight)?;
        let event = self.forward.record()?;
        let _ = self
            .completions
            .send(Completion::WarmUp { event, in_flight });
        Ok(())
    }
}

/// Ends the waits for the stage's steps, however the stage ends.
impl Drop for Stage {
    fn drop(&mut self) {
        self.kv.counter.close();
        // The device may still compute abandoned steps, in memory that is freed with the stage. A lost device computes
        // no more.
        let _ = self.forward.synchronize();
    }
}

/// Keeps the stage running after any panic in a step.
fn without_panic<T>(work: impl FnOnce() -> Result<T, StepError>) -> Result<T, StepError> {
    let result = catch_unwind(AssertUnwindSafe(work));
    let panicked = || StepError::Failed(String::from("the executor's code panicked"));
    result.unwrap_or_else(|_| Err(panicked()))
}
