//! An executor without a model that is honest about KV: what it draws depends on the whole
//! history of a slot, and it reads that history back through the slot's pages.
//!
//! A row of a page records its token, its position and a hash of everything before it. A
//! span that finds another row than its history calls for fails its step and says which, so
//! wrong page handling cannot go unnoticed. The batch is checked just as strictly.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::{
    Batch, BatchOutput, InputToken, KvGroupId, PageCopy, PageId, PageTableDelta, Sample, SlotId,
    SlotStart, Span, StepId, TokenId,
};

use crate::mock_executor::step_timer::StepTimer;
use crate::mock_model::Sequence;
use crate::{
    DType, Executor, ExecutorError, ExecutorInfo, Fault, KvFormat, KvLayout, MockConfig, StepWaker,
    TokenMask,
};

pub struct MockExecutor {
    config: MockConfig,
    rows: Vec<Row>,
    slots: Vec<Option<Slot>>,
    inflight: VecDeque<Inflight>,
    /// When the last step leaves the last stage.
    busy_until: Instant,
    lost: bool,
    logits: Vec<f32>,
    timer: Option<StepTimer>,
}

struct Inflight {
    batch: Arc<Batch>,
    masks: Option<Vec<TokenMask>>,
    done_at: Instant,
    /// Planned before an earlier step's failure was known: it may read what that step left
    /// undefined, and nobody will use what it makes of it.
    precedes_bad_news: bool,
}

struct Slot {
    sequence: Sequence,
    table: Vec<PageId>,
    drawn: Option<(StepId, TokenId)>,
    /// Holds results of a failed step.
    undefined: bool,
}

/// The KV of one position.
#[derive(Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Row {
    position: u32,
    token: TokenId,
    chain: u64,
}

impl Row {
    const NEVER_WRITTEN: Self = Self {
        position: u32::MAX,
        token: u32::MAX,
        chain: 0,
    };
    const UNDEFINED: Self = Self {
        position: u32::MAX - 1,
        token: u32::MAX,
        chain: 0,
    };
    const REJECTED: Self = Self {
        position: u32::MAX - 2,
        token: u32::MAX,
        chain: 0,
    };

    fn describe(self) -> String {
        match self {
            Self::NEVER_WRITTEN => "was never written".into(),
            Self::UNDEFINED => "a failed step left undefined".into(),
            Self::REJECTED => "holds a draft that was not drawn".into(),
            Row {
                position, token, ..
            } => format!("holds token {token} at position {position} of another history"),
        }
    }
}

impl MockExecutor {
    pub fn new(config: MockConfig) -> Self {
        Self {
            rows: vec![Row::NEVER_WRITTEN; config.num_pages as usize * config.page_size as usize],
            slots: Vec::new(),
            inflight: VecDeque::new(),
            busy_until: Instant::now(),
            lost: false,
            logits: Vec::new(),
            timer: None,
            config,
        }
    }

    /// The bookkeeping of a batch. Holds even when its computation fails, because the
    /// scheduler counts on it.
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
        self.slots[index] = Some(Slot {
            sequence: Sequence::new(&self.config, start.clone()),
            table: Vec::new(),
            drawn: None,
            undefined: false,
        });
        Ok(())
    }

    fn update_table(&mut self, delta: &PageTableDelta, pages: &[PageId]) -> Result<(), String> {
        let PageTableDelta { slot, first, .. } = *delta;
        if delta.group != KvGroupId(0) {
            return Err(format!("slot {slot} has no KV group {}", delta.group));
        }
        if let Some(page) = pages.iter().find(|page| page.0 >= self.config.num_pages) {
            return Err(format!(
                "slot {slot} is given page {page}, which does not exist"
            ));
        }
        let table = &mut slot_mut(&mut self.slots, slot)?.table;
        if first as usize > table.len() {
            return Err(format!(
                "slot {slot} is given entry {first} of a page table of {}",
                table.len()
            ));
        }
        for (offset, &page) in pages.iter().enumerate() {
            let entry = first as usize + offset;
            if entry < table.len() {
                table[entry] = page;
            } else {
                table.push(page);
            }
        }
        Ok(())
    }

    fn copy_rows(&mut self, copy: &PageCopy, precedes_bad_news: bool) -> Result<(), String> {
        let PageCopy { from, to, num_rows } = *copy;
        let PageId(last) = from.max(to);
        if last >= self.config.num_pages || num_rows > self.config.page_size {
            return Err(format!("{copy:?} is outside the pool"));
        }
        let size = self.config.page_size as usize;
        let source = from.0 as usize * size..from.0 as usize * size + num_rows as usize;
        for row in &self.rows[source.clone()] {
            let is_missing = [Row::NEVER_WRITTEN, Row::REJECTED].contains(row);
            if is_missing || *row == Row::UNDEFINED && !precedes_bad_news {
                return Err(format!("a row to copy from page {from} {}", row.describe()));
            }
        }
        self.rows.copy_within(source, to.0 as usize * size);
        Ok(())
    }

    fn compute(
        &mut self,
        batch: &Batch,
        masks: &[TokenMask],
        precedes_bad_news: bool,
    ) -> Result<BatchOutput, String> {
        for copy in &batch.copies {
            self.copy_rows(copy, precedes_bad_news)?;
        }
        for span in &batch.spans {
            self.write_span(batch, span, precedes_bad_news)?;
        }
        let (mut samples, mut undrawn) = (Vec::new(), Vec::new());
        for span in &batch.spans {
            self.attend(span, batch.span_tokens(span).len(), precedes_bad_news)?;
            if span.sample {
                self.draw_span(batch, span, masks, &mut samples, &mut undrawn)?;
            }
        }
        Ok(BatchOutput {
            step: batch.step,
            samples,
            undrawn,
        })
    }

    /// Appends the span to its slot's history, and its rows to the slot's pages.
    fn write_span(
        &mut self,
        batch: &Batch,
        span: &Span,
        precedes_bad_news: bool,
    ) -> Result<(), String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        let drafts = batch.span_drafts(span).iter();
        let is_odd =
            span.num_drafts > 0 && (!span.sample || span.num_drafts as usize == span.tokens.len());
        if is_odd || { drafts }.any(|input| matches!(input, InputToken::FromStep { .. })) {
            return Err(format!(
                "the drafts of slot {} are not known tokens behind a token to draw from",
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
            let index = row_index(slot, position, self.config.page_size)?;
            self.rows[index] = row;
        }
        Ok(())
    }

    /// Reads every row up to the end of the span.
    fn attend(&mut self, span: &Span, len: usize, precedes_bad_news: bool) -> Result<(), String> {
        let slot = slot_mut(&mut self.slots, span.slot)?;
        for position in 0..span.start as usize + len {
            let row = self.rows[row_index(slot, position, self.config.page_size)?];
            let expected = Row {
                position: position as u32,
                token: slot.sequence.tokens[position],
                chain: slot.sequence.chains[position],
            };
            if row == Row::UNDEFINED && (slot.undefined || precedes_bad_news) {
                slot.undefined = true;
            } else if row != expected {
                let size = self.config.page_size as usize;
                return Err(format!(
                    "slot {} reads token {} at position {position} from row {} of page {}, which {}",
                    span.slot,
                    expected.token,
                    position % size,
                    slot.table[position / size],
                    row.describe()
                ));
            }
        }
        Ok(())
    }

    /// Draws behind the span's last token that is no draft, and behind each draft that was drawn.
    /// The slot forgets the others, and their rows are nobody's.
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
            self.rows[row_index(slot, position, self.config.page_size)?] = Row::REJECTED;
        }
        slot.sequence.truncate(num_tokens);
        Ok(())
    }

    /// The inner error is the row's, the outer one the step's.
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
            let chain = self.rows[row_index(slot, num_tokens - 1, self.config.page_size)?].chain;
            let mask = masks.iter().find(|mask| mask.slot == slot_id);
            let allowed = mask.map(|mask| &mask.allowed[..]);
            let logits = &mut self.logits;
            self.config
                .draw(&slot.sequence, num_tokens, chain, allowed, logits)
        };
        // A step planned ahead goes on from whatever it is.
        let token = drawn.as_ref().map_or(0, |sample| sample.token);
        slot.drawn = Some((step, token));
        Ok(drawn)
    }

    /// After a failure: whatever the step would have written is undefined, and steps already
    /// planned on top of it must still run.
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
                if let Ok(index) = row_index(slot, position, self.config.page_size) {
                    self.rows[index] = Row::UNDEFINED;
                }
            }
        }
        for later in &mut self.inflight {
            later.precedes_bad_news = true;
        }
    }

    fn page_rows(&mut self, page: PageId, num_bytes: usize) -> Result<&mut [Row], ExecutorError> {
        let lost = |reason: String| Err(ExecutorError::Lost { reason });
        if !self.inflight.is_empty() {
            return lost(format!("page {page} is accessed while a step is in flight"));
        }
        if page.0 >= self.config.num_pages || num_bytes != self.kv_layout().page_bytes {
            return lost(format!(
                "page {page} of {num_bytes} bytes is outside the pool"
            ));
        }
        let size = self.config.page_size as usize;
        Ok(&mut self.rows[page.0 as usize * size..][..size])
    }
}

fn slot_mut(slots: &mut [Option<Slot>], slot: SlotId) -> Result<&mut Slot, String> {
    slots
        .get_mut(slot.0 as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| format!("slot {slot} holds no request"))
}

fn row_index(slot: &Slot, position: usize, page_size: u32) -> Result<usize, String> {
    let size = page_size as usize;
    match slot.table.get(position / size) {
        Some(page) => Ok(page.0 as usize * size + position % size),
        None => Err(format!(
            "position {position} of slot {} is beyond its {} pages",
            slot.sequence.start.slot,
            slot.table.len()
        )),
    }
}

impl Executor for MockExecutor {
    fn info(&self) -> ExecutorInfo {
        ExecutorInfo {
            device: "mock".into(),
            isa: "none".into(),
            num_threads: 1,
            weight_bytes: 0,
        }
    }

    fn kv_layout(&self) -> KvLayout {
        KvLayout {
            num_pages: self.config.num_pages,
            page_size: self.config.page_size,
            format: KvFormat::Float(DType::F32),
            page_bytes: self.config.page_size as usize * size_of::<Row>(),
        }
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        let cost = self.config.cost.as_ref();
        let duration = cost.map_or(Duration::ZERO, |cost| cost.step_duration(&batch));
        let stage_duration = duration / self.config.num_stages;
        let now = Instant::now();
        let waits = |token: &InputToken| matches!(token, InputToken::FromStep { .. });
        self.busy_until = if batch.tokens.iter().any(waits) {
            self.busy_until.max(now) + duration
        } else {
            (now + duration).max(self.busy_until + stage_duration)
        };
        let faults = self.config.faults.iter();
        let hangs = faults.filter_map(|(step, fault)| match fault {
            Fault::Hang(duration) if *step == batch.step => Some(*duration),
            _ => None,
        });
        let hang = hangs.sum();
        self.inflight.push_back(Inflight {
            batch,
            masks: None,
            done_at: self.busy_until + hang,
            precedes_bad_news: false,
        });
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        let inflight = self
            .inflight
            .iter_mut()
            .find(|inflight| inflight.batch.step == step);
        match inflight {
            Some(inflight) => {
                inflight.masks = Some(masks);
                if let Some(timer) = &self.timer {
                    timer.wake_at(inflight.done_at);
                }
                Ok(())
            }
            None => Err(ExecutorError::Lost {
                reason: format!("step {step} is sampled but not in flight"),
            }),
        }
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        match self.inflight.front() {
            Some(oldest) if Instant::now() < oldest.done_at => Ok(None),
            Some(_) | None => self.wait().map(Some),
        }
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.timer = Some(StepTimer::start(waker));
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let lost = |reason: &str| {
            Err(ExecutorError::Lost {
                reason: reason.into(),
            })
        };
        let Some(inflight) = self.inflight.pop_front() else {
            return lost("no step is in flight");
        };
        let Some(masks) = inflight.masks else {
            return lost("a step is waited for before it is sampled");
        };
        std::thread::sleep(inflight.done_at.saturating_duration_since(Instant::now()));

        let batch = &*inflight.batch;
        let step = batch.step;
        let applied = self.apply(batch);
        let mut faults = self.config.faults.iter();
        match faults.find(|(at, _)| *at == step).map(|&(_, fault)| fault) {
            _ if self.lost => return lost("a fault was injected"),
            Some(Fault::Lost) => {
                self.lost = true;
                return lost("a fault was injected");
            }
            Some(Fault::Fail) => {
                self.undo(batch);
                let reason = "a fault was injected".into();
                return Err(ExecutorError::StepFailed { step, reason });
            }
            Some(Fault::Panic) => {
                self.undo(batch);
                panic!("a fault was injected in step {step}");
            }
            Some(Fault::Hang(_) | Fault::Undrawn) | None => {}
        }
        let is_undrawn = self.config.faults.contains(&(step, Fault::Undrawn));
        applied
            .and_then(|()| self.compute(batch, &masks, inflight.precedes_bad_news))
            .map(|mut output| {
                if is_undrawn && let Some(&(slot, _)) = output.samples.first() {
                    output.samples.retain(|(other, _)| *other != slot);
                    output.undrawn.push((slot, "a fault was injected".into()));
                }
                output
            })
            .map_err(|reason| {
                self.undo(batch);
                ExecutorError::StepFailed { step, reason }
            })
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<(), ExecutorError> {
        let rows = self.page_rows(page, out.len())?;
        out.copy_from_slice(bytemuck::cast_slice(rows));
        Ok(())
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ExecutorError> {
        let rows = self.page_rows(page, bytes.len())?;
        bytemuck::cast_slice_mut(rows).copy_from_slice(bytes);
        Ok(())
    }
}

mod step_timer;
#[cfg(test)]
mod tests;
