//! An executor without a model. Its draws depend on the whole history of a slot, and it reads this history from the
//! slot's pages, as attention does.
//!
//! A row of a page records its token, its position and a hash of all earlier tokens, and each KV group has rows of its
//! own. If a span finds a row of another history within a group's window, its step fails, and the error names the row.
//! So wrong page handling cannot go unnoticed. A step also fails if a slot starts with the recurrent state of other
//! tokens. The batch is checked just as strictly, also against the steps that have not returned (`batch_check.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use corella_core::{
    Batch, BatchOutput, InputToken, KvGroup, PageCopy, PageId, PageTableDelta, Sample, SlotId,
    SlotStart, Span, StepId, TokenId, Yield,
};

use crate::mock::mock_adapters::MockAdapters;
pub use crate::mock::mock_executor::step_gate::StepGate;
use crate::mock::mock_executor::step_time::{StepClock, StepTime};
use crate::mock::mock_executor::step_timer::StepTimer;
use crate::mock::mock_kv::{MockKv, Row};
use crate::mock::mock_model::Sequence;
use crate::{BatchCheck, ExecutorError, Fault, MeanPool, MockConfig, TokenMask};

pub struct MockExecutor {
    config: MockConfig,
    kv: Arc<MockKv>,
    adapters: Arc<MockAdapters>,
    slots: Vec<Option<Slot>>,
    inflight: VecDeque<Inflight>,
    check: BatchCheck,
    clock: StepClock,
    lost: bool,
    logits: Vec<f32>,
    timer: Option<StepTimer>,
}

struct Inflight {
    batch: Arc<Batch>,
    /// Whether the batch follows the rules, given the steps in flight at its submission.
    checked: Result<(), String>,
    masks: Option<Vec<TokenMask>>,
    time: StepTime,
    /// Whether the step was planned before the failure of an earlier step was known. Such a step may read void rows of
    /// the earlier one, and its results are dropped.
    precedes_bad_news: bool,
    begun: Option<Begun>,
}

/// A step whose bookkeeping is done.
struct Begun {
    /// The rows to store in pages, or the reason for the step's failure.
    rows: Result<Vec<(usize, Row)>, ExecutorError>,
    num_stored_layers: usize,
}

struct Slot {
    sequence: Sequence,
    /// The page table of each KV group. Entries that were never given are `None`; they are behind the group's window.
    tables: Vec<Vec<Option<PageId>>>,
    drawn: Option<(StepId, TokenId)>,
    /// Whether the slot depends on results of a failed step.
    undefined: bool,
    mean: MeanPool,
}

impl MockExecutor {
    pub fn new(config: MockConfig) -> Self {
        Self {
            kv: Arc::new(MockKv::new(&config)),
            adapters: Arc::default(),
            slots: Vec::new(),
            inflight: VecDeque::new(),
            check: BatchCheck::new(config.page_size, &config.kv_groups),
            clock: StepClock::new(Instant::now()),
            lost: false,
            logits: Vec::new(),
            timer: None,
            config,
        }
    }

    /// Does the bookkeeping of a batch, even if its computation fails: the scheduler relies on it.
    fn apply(&mut self, batch: &Batch) -> Result<(), String> {
        let mut result = Ok(());
        let mut note = |outcome: Result<(), String>| {
            if result.is_ok() {
                result = outcome;
            }
        };
        for &slot in &batch.released {
            note(self.release(slot));
        }
        for start in &batch.started {
            note(self.start(start));
        }
        for delta in &batch.tables {
            note(self.update_table(delta, batch.delta_pages(delta)));
        }
        result
    }

    fn release(&mut self, slot: SlotId) -> Result<(), String> {
        match self.slots.get_mut(slot.0 as usize).and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(format!("slot {slot} is released but holds no request")),
        }
    }

    fn start(&mut self, start: &SlotStart) -> Result<(), String> {
        let index = start.slot.0 as usize;
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || None);
        }
        if let Some(before) = &self.slots[index] {
            return Err(format!(
                "slot {} is started for request {} but still holds request {}",
                start.slot, start.request, before.sequence.start.request
            ));
        }
        let adapter = start.adapter.as_deref();
        if let Some(adapter) = adapter.filter(|name| !self.adapters.has(name)) {
            return Err(format!("adapter {adapter} is not loaded"));
        }
        self.slots[index] = Some(Slot {
            sequence: Sequence::new(&self.config, start.clone()),
            tables: vec![Vec::new(); self.config.kv_groups.len()],
            drawn: None,
            undefined: false,
            mean: MeanPool::default(),
        });
        Ok(())
    }

    fn update_table(&mut self, delta: &PageTableDelta, pages: &[PageId]) -> Result<(), String> {
        let PageTableDelta {
            slot, group, first, ..
        } = *delta;
        let group = group.0 as usize;
        let Some(KvGroup { window }) = self.config.kv_groups.get(group) else {
            return Err(format!("slot {slot} has no KV group {group}"));
        };
        if let Some(page) = pages.iter().find(|page| page.0 >= self.config.num_pages) {
            return Err(format!(
                "slot {slot} is given page {page}, which does not exist"
            ));
        }
        let table = &mut slot_mut(&mut self.slots, slot)?.tables[group];
        if table.is_empty() && window.is_some() {
            // The slot starts with cached tokens, and no span reads the pages before `first`.
            table.resize(first as usize, None);
        }
        if first as usize > table.len() {
            return Err(format!(
                "slot {slot} is given entry {first} of a page table of {}",
                table.len()
            ));
        }
        for (offset, &page) in pages.iter().enumerate() {
            let entry = first as usize + offset;
            if entry < table.len() {
                table[entry] = Some(page);
            } else {
                table.push(Some(page));
            }
        }
        Ok(())
    }

    fn restore(&mut self, start: &SlotStart, precedes_bad_news: bool) -> Result<(), String> {
        let slot = slot_mut(&mut self.slots, start.slot)?;
        slot.undefined = self.kv.snapshots.restore(start, &slot.sequence)?;
        match slot.undefined && !precedes_bad_news {
            true => Err(format!(
                "slot {} starts with a state that is undefined",
                start.slot
            )),
            false => Ok(()),
        }
    }

    fn copy_rows(&mut self, copy: &PageCopy, precedes_bad_news: bool) -> Result<(), String> {
        let PageCopy { from, to, num_rows } = *copy;
        let PageId(last) = from.max(to);
        if last >= self.config.num_pages || num_rows > self.config.page_size {
            return Err(format!("{copy:?} is outside the pool"));
        }
        let size = self.config.page_size as usize;
        let [from_row, to_row] = [from, to].map(|page| page.0 as usize * size);
        for layer in 0..self.kv.num_layers() {
            for at in 0..num_rows as usize {
                let row = self.kv.load(layer, from_row + at);
                let is_missing = [Row::NEVER_WRITTEN, Row::REJECTED].contains(&row);
                if is_missing || row == Row::UNDEFINED && !precedes_bad_news {
                    return Err(format!("a row to copy from page {from} {}", row.describe()));
                }
                self.kv.copy(layer, from_row + at, to_row + at);
            }
        }
        Ok(())
    }

    /// Carries out the part of a step that is due by now: its bookkeeping first, then its rows, layer by layer.
    fn advance(&mut self, inflight: &mut Inflight, now: Instant) {
        if inflight.begun.is_none() && now >= inflight.time.ready_at(0) {
            inflight.begun = Some(Begun {
                rows: self.begin(inflight),
                num_stored_layers: 0,
            });
        }
        let due =
            (0..self.kv.num_layers()).take_while(|&layer| now >= inflight.time.ready_at(layer));
        let num_due_layers = due.count();
        let step = inflight.batch.step;
        let Some(begun) = &mut inflight.begun else {
            return;
        };
        let Ok(rows) = &begun.rows else {
            return;
        };
        for layer in begun.num_stored_layers..num_due_layers {
            for &(index, row) in rows {
                self.kv.store(layer, index, row);
            }
            self.kv.counter.advance(step, layer + 1);
        }
        begun.num_stored_layers = num_due_layers;
    }

    /// Does a step's bookkeeping, and returns the rows to store in pages.
    fn begin(&mut self, inflight: &Inflight) -> Result<Vec<(usize, Row)>, ExecutorError> {
        let batch = &*inflight.batch;
        let step = batch.step;
        let applied = self.apply(batch).and_then(|()| inflight.checked.clone());
        let mut faults = self.config.faults.iter();
        match faults.find(|(at, _)| *at == step).map(|&(_, fault)| fault) {
            _ if self.lost => return Err(lost("a fault was injected")),
            Some(Fault::Lost) => {
                self.lost = true;
                return Err(lost("a fault was injected"));
            }
            Some(Fault::Fail) => {
                self.undo(batch);
                let reason = "a fault was injected".into();
                return Err(ExecutorError::StepFailed { step, reason });
            }
            Some(Fault::Panic | Fault::Hang(_) | Fault::Undrawn) | None => {}
        }
        let precedes_bad_news = inflight.precedes_bad_news;
        let make_rows = |this: &mut Self| {
            for start in &batch.started {
                this.restore(start, precedes_bad_news)?;
            }
            for copy in &batch.copies {
                this.copy_rows(copy, precedes_bad_news)?;
            }
            let mut rows = Vec::new();
            for span in &batch.spans {
                this.append_span(batch, span, precedes_bad_news, &mut rows)?;
            }
            for &taken in &batch.snapshots {
                let slot = slot_mut(&mut this.slots, taken.slot)?;
                let (sequence, is_undefined) = (&slot.sequence, slot.undefined);
                this.kv.snapshots.take(taken, sequence, is_undefined)?;
            }
            Ok(rows)
        };
        applied
            .and_then(|()| make_rows(self))
            .map_err(|reason: String| {
                self.undo(batch);
                ExecutorError::StepFailed { step, reason }
            })
    }

    /// Computes attention and draws, after all rows have been stored.
    fn finish(&mut self, inflight: Inflight) -> Result<BatchOutput, ExecutorError> {
        self.check.end_step();
        let Some(masks) = &inflight.masks else {
            return Err(lost("a step is waited for before it is sampled"));
        };
        let (batch, step) = (&*inflight.batch, inflight.batch.step);
        let begun = inflight
            .begun
            .as_ref()
            .expect("a step ends after it has begun");
        if let Err(error) = &begun.rows {
            match error {
                ExecutorError::Lost { .. } => self.kv.counter.close(),
                ExecutorError::StepFailed { .. } => self.kv.counter.finish(step),
            }
            return Err(error.clone());
        }
        self.kv.counter.finish(step);
        if self.config.faults.contains(&(step, Fault::Panic)) {
            self.undo(batch);
            panic!("a fault was injected in step {step}");
        }
        let mut output = self.draw_all(&inflight, masks).map_err(|reason| {
            self.undo(batch);
            ExecutorError::StepFailed { step, reason }
        })?;
        if self.config.faults.contains(&(step, Fault::Undrawn))
            && let Some(&(slot, _)) = output.samples.first()
        {
            output.samples.retain(|(other, _)| *other != slot);
            output.logprobs.retain(|(other, _)| *other != slot);
            output.undrawn.push((slot, "a fault was injected".into()));
        }
        Ok(output)
    }

    fn draw_all(
        &mut self,
        inflight: &Inflight,
        masks: &[TokenMask],
    ) -> Result<BatchOutput, String> {
        let (batch, precedes_bad_news) = (&*inflight.batch, inflight.precedes_bad_news);
        let (mut samples, mut undrawn) = (Vec::new(), Vec::new());
        let (mut logprobs, mut hidden_states) = (Vec::new(), Vec::new());
        for span in &batch.spans {
            self.attend(span, batch.span_tokens(span).len(), precedes_bad_news)?;
            if let Yield::Logprobs {
                positions, next, ..
            } = &span.yields
            {
                let scored = self.score_span(span, positions.clone(), *next)?;
                logprobs.push((span.slot, scored));
            }
            let state = self.pool_span(span)?;
            hidden_states.extend(state.map(|state| (span.slot, state)));
            if span.yields.draws() {
                self.draw_span(batch, span, masks, &mut samples, &mut undrawn)?;
            }
        }
        let is_whole = |slot| undrawn.iter().all(|&(other, _)| other != slot);
        logprobs.retain(|&(slot, _)| is_whole(slot));
        Ok(BatchOutput {
            step: batch.step,
            samples,
            logprobs,
            hidden_states,
            undrawn,
        })
    }

    /// Appends the span to its slot's history, and the span's rows to `rows`.
    fn append_span(
        &mut self,
        batch: &Batch,
        span: &Span,
        precedes_bad_news: bool,
        rows: &mut Vec<(usize, Row)>,
    ) -> Result<(), String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        let mut drafts = batch.span_drafts(span).iter();
        let is_odd = span.num_drafts > 0
            && (!span.yields.draws() || span.num_drafts as usize == span.tokens.len());
        if is_odd || drafts.any(|input| matches!(input, InputToken::FromStep { .. })) {
            return Err(format!(
                "the drafts of slot {} must be known tokens, after a token from which the slot draws",
                span.slot
            ));
        }
        if span.start as usize != slot.sequence.tokens.len() {
            return Err(format!(
                "a span of slot {} starts at position {} of a history of {}",
                span.slot,
                span.start,
                slot.sequence.tokens.len()
            ));
        }
        for &input in batch.span_tokens(span) {
            let token = match input {
                InputToken::Known(token) => token,
                InputToken::FromStep { step, slot: source } => {
                    let drawn = slot.drawn.filter(|drawn| drawn.0 == step);
                    match drawn.filter(|_| source == span.slot) {
                        Some((_, token)) => token,
                        None if precedes_bad_news => {
                            slot.undefined = true;
                            0
                        }
                        None => {
                            return Err(format!(
                                "slot {} wants the token of step {step} and slot {source}, which \
                                 drew none for it",
                                span.slot
                            ));
                        }
                    }
                }
            };
            if token as usize >= self.config.vocab_size {
                return Err(format!("slot {}: token {token} does not exist", span.slot));
            }
            let position = slot.sequence.tokens.len();
            slot.sequence.push(&self.config, token);
            let row = Row {
                position: position as u32,
                token,
                chain: slot.sequence.chains[position],
            };
            let row = if slot.undefined { Row::UNDEFINED } else { row };
            for group in 0..self.config.kv_groups.len() {
                let index = row_index(slot, group, position, self.config.page_size)?;
                rows.push((index, row.in_group(group)));
            }
        }
        Ok(())
    }

    /// Reads the rows that the span attends to, in all groups.
    fn attend(&mut self, span: &Span, len: usize, precedes_bad_news: bool) -> Result<(), String> {
        for group in 0..self.config.kv_groups.len() {
            self.attend_in_group(group, span, len, precedes_bad_news)?;
        }
        Ok(())
    }

    /// Reads a group's rows from the start of the window of the span's first token to the end of the span.
    fn attend_in_group(
        &mut self,
        group: usize,
        span: &Span,
        len: usize,
        precedes_bad_news: bool,
    ) -> Result<(), String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        let first = self.config.kv_groups[group].first_row_read(span.start) as usize;
        for position in first..span.start as usize + len {
            let index = row_index(slot, group, position, self.config.page_size)?;
            let expected = Row {
                position: position as u32,
                token: slot.sequence.tokens[position],
                chain: slot.sequence.chains[position],
            };
            let expected = expected.in_group(group);
            let is_other = |&(layer, row): &(usize, Row)| row != expected.in_layer(layer);
            let layers = 0..self.kv.num_layers();
            let mut rows = layers.map(|layer| (layer, self.kv.load(layer, index)));
            let Some((layer, row)) = rows.find(is_other) else {
                continue;
            };
            if row == Row::UNDEFINED && (slot.undefined || precedes_bad_news) {
                slot.undefined = true;
            } else {
                let size = self.config.page_size as usize;
                return Err(format!(
                    "slot {} reads token {} at position {position} from row {} of page {} in \
                     layer {layer}, which {}",
                    span.slot,
                    expected.token,
                    index % size,
                    index / size,
                    row.describe()
                ));
            }
        }
        Ok(())
    }

    /// Draws after the span's last token that is not a draft, and after each draft that was drawn.
    /// The slot forgets the other drafts, and their rows are marked as rejected.
    fn draw_span(
        &mut self,
        batch: &Batch,
        span: &Span,
        masks: &[TokenMask],
        samples: &mut Vec<(SlotId, Sample)>,
        undrawn: &mut Vec<(SlotId, Box<str>)>,
    ) -> Result<(), String> {
        let is_masked = masks.iter().any(|mask| mask.slot == span.slot);
        let end = span.start as usize + span.tokens.len();
        let mut num_tokens = end - span.num_drafts as usize;
        for draft in batch.span_drafts(span).iter().map(Some).chain([None]) {
            let token = match self.draw(batch.step, span.slot, num_tokens, masks)? {
                Ok(sample) => {
                    let token = sample.token;
                    samples.push((span.slot, sample));
                    token
                }
                Err(reason) => {
                    let is_first = num_tokens == end - span.num_drafts as usize;
                    undrawn.extend(is_first.then(|| (span.slot, reason.into())));
                    break;
                }
            };
            if is_masked || draft != Some(&InputToken::Known(token)) {
                break;
            }
            num_tokens += 1;
        }
        let slot = slot_mut(&mut self.slots, span.slot)?;
        for position in num_tokens..end {
            for group in 0..self.config.kv_groups.len() {
                let index = row_index(slot, group, position, self.config.page_size)?;
                self.kv.store_in_all_layers(index, Row::REJECTED);
            }
        }
        slot.sequence.truncate(num_tokens);
        Ok(())
    }

    /// Draws one token. The inner error says why the slot cannot draw, the outer error why the step fails.
    fn draw(
        &mut self,
        step: StepId,
        slot: SlotId,
        num_tokens: usize,
        masks: &[TokenMask],
    ) -> Result<Result<Sample, String>, String> {
        let slot_id = slot;
        let slot = slot_mut(&mut self.slots, slot)?;
        let drawn = if slot.undefined {
            Ok(Sample {
                token: 0,
                logprobs: None,
            })
        } else {
            let last = row_index(slot, 0, num_tokens - 1, self.config.page_size)?;
            let chain = self.kv.load(0, last).chain;
            let mask = masks.iter().find(|mask| mask.slot == slot_id);
            let allowed = mask.map(|mask| &mask.allowed[..]);
            let logits = &mut self.logits;
            self.config
                .draw(&slot.sequence, num_tokens, chain, allowed, logits)
        };
        // If nothing was drawn, a step that was planned ahead continues from token 0.
        let token = drawn.as_ref().map_or(0, |sample| sample.token);
        slot.drawn = Some((step, token));
        Ok(drawn)
    }

    /// Handles the failure of a step: its rows become void, and steps that were planned after it must still run.
    fn undo(&mut self, batch: &Batch) {
        for span in &batch.spans {
            let Ok(slot) = slot_mut(&mut self.slots, span.slot) else {
                continue;
            };
            slot.undefined = true;
            let end = span.start as usize + batch.span_tokens(span).len();
            while slot.sequence.tokens.len() < end {
                slot.sequence.push(&self.config, 0);
            }
            for position in span.start as usize..end {
                for group in 0..self.config.kv_groups.len() {
                    if let Ok(index) = row_index(slot, group, position, self.config.page_size) {
                        self.kv.store_in_all_layers(index, Row::UNDEFINED);
                    }
                }
            }
        }
        for taken in &batch.snapshots {
            self.kv.snapshots.undo(taken.to);
        }
        for later in &mut self.inflight {
            later.precedes_bad_news = true;
        }
    }
}

/// Ends the waits for the executor's steps, even if the executor panics.
impl Drop for MockExecutor {
    fn drop(&mut self) {
        self.kv.counter.close();
    }
}

fn lost(reason: &str) -> ExecutorError {
    ExecutorError::Lost {
        reason: reason.into(),
    }
}

fn slot_mut(slots: &mut [Option<Slot>], slot: SlotId) -> Result<&mut Slot, String> {
    slots
        .get_mut(slot.0 as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| format!("slot {slot} holds no request"))
}

fn row_index(slot: &Slot, group: usize, position: usize, page_size: u32) -> Result<usize, String> {
    let size = page_size as usize;
    let (table, id) = (&slot.tables[group], slot.sequence.start.slot);
    match table.get(position / size) {
        Some(Some(page)) => Ok(page.0 as usize * size + position % size),
        Some(None) => Err(format!(
            "position {position} of slot {id} is read, and its page in KV group {group} was never \
             given"
        )),
        None => Err(format!(
            "position {position} of slot {id} is beyond its {} pages",
            table.len()
        )),
    }
}

mod face;
mod scoring;
pub(crate) mod state;
mod step_gate;
mod step_time;
mod step_timer;
#[cfg(test)]
mod tests;
