//! The state of each running request: sampling parameters, tokens and page tables. Executors maintain it from their
//! batches.

use std::sync::Arc;

use crate::kv::page_table::PageTable;
use crate::{MeanPool, SampleRequest};
use corella_core::{
    Batch, InputToken, KvGroup, PageId, PageTableDelta, SamplingParams, SlotId, SlotStart, Span,
    StepId, TokenId, Yield,
};

/// The state of one running request. `A` is the executor's form of an adapter.
pub struct Slot<A> {
    pub params: SamplingParams,
    pub adapter: Option<Arc<A>>,
    num_prompt_tokens: u32,
    min_tokens: u32,
    masked_until_min_tokens: Arc<[TokenId]>,
    /// Every token whose KV is in the pages, or will be after the current step. The history may end in rejected drafts,
    /// which the request's next span overwrites.
    history: Vec<TokenId>,
    /// The page table of each KV group.
    tables: Vec<SlotTable>,
    /// The newest token drawn for this request, and the step that drew it.
    last_drawn: Option<(StepId, TokenId)>,
    /// The hidden states so far, on the last pipeline stage and only for a mean.
    pub mean: MeanPool,
}

/// The pages of a slot in one KV group. Pages behind the group's window may already belong to other slots.
struct SlotTable {
    group: KvGroup,
    page_size: u32,
    /// Entries before this one are behind the window and were never given.
    first: usize,
    /// The entries from `first` on.
    pages: Vec<PageId>,
}

impl SlotTable {
    fn new(group: KvGroup, limits: &SlotLimits) -> Self {
        let max_num_pages = limits.max_model_len.div_ceil(limits.page_size);
        Self {
            group,
            page_size: limits.page_size,
            first: 0,
            pages: Vec::with_capacity(max_num_pages as usize),
        }
    }

    fn write(&mut self, slot: SlotId, first: usize, pages: &[PageId]) -> Result<(), String> {
        if self.group.window.is_some() && self.pages.is_empty() {
            self.first = first;
        }
        let end = self.first + self.pages.len();
        if !(self.first..=end).contains(&first) {
            return Err(format!(
                "the page table of slot {slot} has entries {} to {end}; entry {first} would leave \
                 a gap",
                self.first
            ));
        }
        let at = first - self.first;
        let overlap = pages.len().min(self.pages.len() - at);
        self.pages[at..at + overlap].copy_from_slice(&pages[..overlap]);
        self.pages.extend_from_slice(&pages[overlap..]);
        Ok(())
    }

    /// Checks that all pages that a span reads and writes are present.
    fn check(&self, slot: SlotId, start: u32, end: usize) -> Result<(), String> {
        let end_page = self.first + self.pages.len();
        if end > end_page * self.page_size as usize {
            return Err(format!(
                "slot {slot} has {end_page} pages of {} positions; its span ends at {end}",
                self.page_size
            ));
        }
        let first_read = self.group.first_page_read(start, self.page_size);
        if (first_read as usize) < self.first {
            return Err(format!(
                "slot {slot} reads entry {first_read} of a page table that begins with entry {}",
                self.first
            ));
        }
        Ok(())
    }

    /// The pages that a checked span from `start` on reads and writes.
    fn read_from(&self, start: u32) -> PageTable<'_> {
        let first = self.group.first_page_read(start, self.page_size) as usize;
        PageTable::new(first, &self.pages[first - self.first..])
    }
}

impl<A> Slot<A> {
    /// The page tables of all KV groups, restricted to the pages that a span reads and writes. The span starts at
    /// `start`, and has already been appended.
    pub fn tables(&self, start: u32) -> impl Iterator<Item = PageTable<'_>> {
        self.tables.iter().map(move |table| table.read_from(start))
    }

    pub fn history(&self) -> &[TokenId] {
        &self.history
    }

    /// Appends a token that no step has computed, so that a draft can be drawn after it. The slot's next span
    /// overwrites it.
    pub fn take_up(&mut self, position: usize, token: TokenId) {
        self.history.truncate(position);
        self.history.push(token);
    }

    pub fn set_drawn(&mut self, step: StepId, token: TokenId) {
        self.last_drawn = Some((step, token));
    }

    /// The input of the draw that follows the first `num_tokens` tokens.
    pub fn sample_request<'a>(
        &'a self,
        num_tokens: usize,
        allowed: Option<&'a [u32]>,
    ) -> SampleRequest<'a> {
        SampleRequest {
            params: &self.params,
            history: &self.history[..num_tokens],
            num_prompt_tokens: self.num_prompt_tokens,
            min_tokens: self.min_tokens,
            masked_until_min_tokens: &self.masked_until_min_tokens,
            allowed,
        }
    }
}

/// The limits against which a batch is checked, because the kernels do not check it.
#[derive(Clone, Debug)]
pub struct SlotLimits {
    pub max_num_seqs: u32,
    pub max_model_len: u32,
    pub num_pages: u32,
    pub page_size: u32,
    pub kv_groups: Vec<KvGroup>,
    pub vocab_size: usize,
}

/// The adapters that slots may start with, by name.
pub trait AdapterSource<A>: Send + Sync {
    fn get(&self, name: &str) -> Option<Arc<A>>;
}

/// The slots of all running requests.
pub struct Slots<A> {
    limits: SlotLimits,
    slots: Vec<Option<Slot<A>>>,
    /// The adapters that requests may name, if supported.
    adapters: Option<Arc<dyn AdapterSource<A>>>,
    /// Recent failed steps, which a later step may still name as the source of a token.
    failed_steps: Vec<StepId>,
    /// Whether these slots learn drawn tokens before later steps compute them. In a pipeline, only the slots of the
    /// first and the last stage do.
    knows_drawn: bool,
}

/// The number of failed steps that are remembered. It is larger than the number of steps in flight.
const MAX_FAILED_STEPS: usize = 16;

impl<A> Slots<A> {
    pub fn new(
        limits: SlotLimits,
        adapters: Option<Arc<dyn AdapterSource<A>>>,
        knows_drawn: bool,
    ) -> Self {
        Self {
            slots: (0..limits.max_num_seqs).map(|_| None).collect(),
            limits,
            adapters,
            failed_steps: Vec::new(),
            knows_drawn,
        }
    }

    pub fn limits(&self) -> &SlotLimits {
        &self.limits
    }

    pub fn get(&self, slot: SlotId) -> Result<&Slot<A>, String> {
        let entry = self.slots.get(slot.0 as usize);
        entry
            .and_then(Option::as_ref)
            .ok_or_else(|| format!("slot {slot} has not been started"))
    }

    pub fn get_mut(&mut self, slot: SlotId) -> Result<&mut Slot<A>, String> {
        started(&mut self.slots, slot)
    }

    /// Records that a step has failed, so that token 0 replaces the tokens that it should have drawn.
    pub fn note_failed(&mut self, step: StepId) {
        if self.failed_steps.len() == MAX_FAILED_STEPS {
            self.failed_steps.remove(0);
        }
        self.failed_steps.push(step);
    }

    /// Keeps the histories as if the step had succeeded, because the steps in flight after it continue them. The
    /// results of these steps for the failed step's requests are discarded.
    pub fn handle_step_failed(&mut self, batch: &Batch) {
        self.note_failed(batch.step);
        for span in &batch.spans {
            let end = span.start as usize + span.tokens.len();
            if let Ok(slot) = started(&mut self.slots, span.slot)
                && end <= self.limits.max_model_len as usize
            {
                slot.history.resize(end, 0);
            }
        }
    }

    /// Applies a batch's releases, starts and page tables. All entries are applied even if one is impossible, because
    /// the others belong to requests that continue.
    pub fn apply(&mut self, batch: &Batch) -> Result<(), String> {
        let mut result = Ok(());
        for slot in &batch.released {
            if let Some(entry) = self.slots.get_mut(slot.0 as usize) {
                *entry = None;
            }
        }
        for start in &batch.started {
            result = result.and(self.start(start));
        }
        for delta in &batch.tables {
            result = result.and(self.write_table(delta, batch.delta_pages(delta)));
        }
        result
    }

    fn start(&mut self, start: &SlotStart) -> Result<(), String> {
        let limits = &self.limits;
        let Some(entry) = self.slots.get_mut(start.slot.0 as usize) else {
            return Err(format!(
                "slot {} is beyond the {} of this executor",
                start.slot, limits.max_num_seqs
            ));
        };
        let adapter = match &start.adapter {
            None => None,
            Some(name) => {
                let adapter = self
                    .adapters
                    .as_ref()
                    .and_then(|adapters| adapters.get(name));
                Some(adapter.ok_or_else(|| format!("adapter {name} is not loaded"))?)
            }
        };
        let mut history = Vec::with_capacity(limits.max_model_len as usize);
        history.extend_from_slice(&start.cached_tokens);
        *entry = Some(Slot {
            params: start.sampling.clone(),
            adapter,
            num_prompt_tokens: start.num_prompt_tokens,
            min_tokens: start.min_tokens,
            masked_until_min_tokens: Arc::clone(&start.masked_until_min_tokens),
            history,
            tables: { limits.kv_groups.iter() }
                .map(|group| SlotTable::new(*group, limits))
                .collect(),
            last_drawn: None,
            mean: MeanPool::default(),
        });
        Ok(())
    }

    fn write_table(&mut self, delta: &PageTableDelta, pages: &[PageId]) -> Result<(), String> {
        let num_pages = self.limits.num_pages;
        if let Some(page) = pages.iter().find(|page| page.0 >= num_pages) {
            return Err(format!(
                "page {page} is beyond the {num_pages} of this executor"
            ));
        }
        let (id, group) = (delta.slot, delta.group);
        let table = self.get_mut(id)?.tables.get_mut(group.0 as usize);
        let table = table.ok_or_else(|| format!("KV group {group} is unknown"))?;
        table.write(id, delta.first as usize, pages)
    }

    /// Appends a span's tokens to its slot's history, after checking them against the limits.
    pub fn append(&mut self, batch: &Batch, span: &Span) -> Result<(), String> {
        let (limits, failed_steps) = (&self.limits, &self.failed_steps);
        let knows_drawn = self.knows_drawn;
        let slot = started(&mut self.slots, span.slot)?;
        let tokens = batch.span_tokens(span);
        let (id, start) = (span.slot, span.start as usize);
        let end = start + tokens.len();
        if tokens.is_empty() {
            return Err(format!("the span of slot {id} is empty"));
        }
        let num_drafts = span.num_drafts as usize;
        if num_drafts > 0 && !(span.yields.draws() && num_drafts < tokens.len()) {
            return Err(format!(
                "the span of slot {id} has {num_drafts} drafts but no token before them"
            ));
        }
        check_scores(span, limits.vocab_size)?;
        if start > slot.history.len() {
            return Err(format!(
                "slot {id} has {} tokens; a span cannot start at {start}",
                slot.history.len()
            ));
        }
        if end > limits.max_model_len as usize {
            return Err(format!(
                "slot {id} would have {end} tokens; the context is {}",
                limits.max_model_len
            ));
        }
        for table in &slot.tables {
            table.check(id, span.start, end)?;
        }
        slot.history.truncate(start);
        for token in tokens {
            let token = match *token {
                InputToken::Known(token) => token,
                InputToken::FromStep { step, slot: from } if from == id => match slot.last_drawn {
                    Some((drawn_in, token)) if drawn_in == step => token,
                    // Any token will do: the step has failed, and the span's result is dropped, or this pipeline stage
                    // never learns drawn tokens.
                    _ if failed_steps.contains(&step) || !knows_drawn => 0,
                    _ => return Err(format!("step {step} drew no token for slot {id}")),
                },
                InputToken::FromStep { slot: from, .. } => {
                    return Err(format!("a span of slot {id} takes a token of slot {from}"));
                }
            };
            if token as usize >= limits.vocab_size {
                return Err(format!(
                    "token {token} is beyond the vocabulary of {}",
                    limits.vocab_size
                ));
            }
            slot.history.push(token);
        }
        Ok(())
    }
}

/// Checks the log-probabilities that a span returns.
fn check_scores(span: &Span, vocab_size: usize) -> Result<(), String> {
    let Yield::Logprobs {
        positions, next, ..
    } = &span.yields
    else {
        return Ok(());
    };
    let (id, start) = (span.slot, span.start);
    let end = start + span.tokens.len() as u32;
    if positions.start <= start || positions.end > end + u32::from(next.is_some()) {
        return Err(format!(
            "the span {start}..{end} of slot {id} cannot score the tokens {positions:?}"
        ));
    }
    match next.filter(|&token| token as usize >= vocab_size) {
        Some(token) => Err(format!(
            "token {token} is beyond the vocabulary of {vocab_size}"
        )),
        None => Ok(()),
    }
}

fn started<A>(slots: &mut [Option<Slot<A>>], slot: SlotId) -> Result<&mut Slot<A>, String> {
    let entry = slots.get_mut(slot.0 as usize);
    entry
        .and_then(Option::as_mut)
        .ok_or_else(|| format!("slot {slot} has not been started"))
}
