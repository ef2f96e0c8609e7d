//! A miniature scheduler that puts an executor through chosen batches.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use corella_core::{
    BatchOutput, HiddenState, KvGroup, PageId, PromptLogprob, RequestId, Sample, SamplingParams,
    SlotId, SlotStart, StepId, TokenId,
};

use crate::generator::mix;
use crate::{BatchBuilder, Executor, ExecutorError, PageForm, TokenMask};

/// A request to play: its prompt, and the parameters of its output.
#[derive(Clone, Debug)]
pub struct Script {
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub num_tokens: usize,
    pub min_tokens: u32,
    pub masked_until_min_tokens: Vec<TokenId>,
}

/// The schedule of several concurrent scripts.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The largest number of prefill tokens of one sequence in one step.
    pub chunk: usize,
    /// The number of steps between arrivals; with 0, all scripts start together.
    pub stagger: usize,
    /// Whether pages are taken in a pseudo-random order instead of ascending order.
    pub shuffled: bool,
    /// The number of steps in flight. With more than one, decode inputs are `FromStep`.
    pub depth: usize,
}

impl Plan {
    pub const WHOLE: Self = Self {
        chunk: usize::MAX,
        stagger: 0,
        shuffled: false,
        depth: 1,
    };
}

/// A script that is being played in a slot.
pub struct Sequence {
    pub slot: u32,
    pub script: Script,
    /// The prompt, and the output that has returned.
    pub tokens: Vec<TokenId>,
    /// The number of positions whose KV is in the pages, including steps in flight.
    pub num_computed: usize,
    /// The page table of each KV group. Entries without a page are behind the group's window.
    pub tables: Vec<Vec<Option<u32>>>,
    pub samples: Vec<Sample>,
    /// The log-probabilities of the prompt, if the script asks for them.
    pub logprobs: Vec<PromptLogprob>,
    /// The hidden state of the prompt, if the script asks for it. Such a script draws no token.
    pub hidden_state: Option<HiddenState>,
    num_asked: usize,
    last_asked_step: u64,
}

/// Plays scripts on an executor.
pub struct Driver {
    pub executor: Box<dyn Executor>,
    pub batch: BatchBuilder,
    page_size: usize,
    groups: Vec<KvGroup>,
    /// Whether sequences keep pages behind their windows, so that others can share them.
    pub keeps_pages: bool,
    next_step: u64,
    free_pages: VecDeque<u32>,
    shuffle: Option<u64>,
    masks: Vec<TokenMask>,
    inflight: VecDeque<Inflight>,
    asked: Vec<(SlotId, usize)>,
}

/// A step in flight.
struct Inflight {
    step: u64,
    /// The slots with a sample, each with the largest number of additional samples after drafts.
    asked: Vec<(SlotId, usize)>,
    /// The starts of the slots' spans.
    starts: Vec<(SlotId, u32)>,
}

/// The byte that fills pages behind a window. The resulting numbers are finite, and are no key or value of any model.
const OVERWRITTEN: u8 = 0x44;

impl Driver {
    pub fn new(executor: Box<dyn Executor>) -> Self {
        let layout = executor.kv_layout();
        Self {
            executor,
            batch: BatchBuilder::new(0),
            page_size: layout.page_size as usize,
            groups: layout.groups,
            keeps_pages: false,
            next_step: 0,
            free_pages: (0..layout.num_pages).collect(),
            shuffle: None,
            masks: Vec::new(),
            inflight: VecDeque::new(),
            asked: Vec::new(),
        }
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Takes pages in pseudo-random order from now on.
    pub fn shuffle_pages(&mut self) {
        self.shuffle = Some(1);
    }

    /// Plays all scripts to their ends.
    pub fn play(&mut self, scripts: &[Script], plan: &Plan) -> Vec<Vec<Sample>> {
        let played = self.play_all(scripts, plan).into_iter();
        played.map(|sequence| sequence.samples).collect()
    }

    pub fn play_all(&mut self, scripts: &[Script], plan: &Plan) -> Vec<Sequence> {
        if plan.shuffled {
            self.shuffle_pages();
        }
        let mut live: BTreeMap<u32, Sequence> = BTreeMap::new();
        let mut done: BTreeMap<u32, Sequence> = BTreeMap::new();
        let mut round = 0;
        while done.len() < scripts.len() {
            for (index, script) in scripts.iter().enumerate() {
                if index * plan.stagger == round {
                    live.insert(index as u32, self.begin(index as u32, script));
                }
            }
            // Every other round is reversed, because the order of spans must not matter either.
            let mut order: Vec<&mut Sequence> = live.values_mut().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for sequence in order {
                self.advance(sequence, plan.chunk);
            }
            self.submit();
            if self.inflight.len() >= plan.depth {
                self.receive(live.values_mut());
            }
            for slot in live.keys().copied().collect::<Vec<_>>() {
                if live[&slot].is_done() {
                    let sequence = live.remove(&slot).expect("it was just there");
                    done.insert(slot, self.release(sequence));
                }
            }
            round += 1;
        }
        while !self.inflight.is_empty() {
            self.receive([]);
        }
        done.into_values().collect()
    }

    pub fn begin(&mut self, slot: u32, script: &Script) -> Sequence {
        self.begin_from(slot, script, &[], &script.prompt, 0)
    }

    /// Begins a sequence at the end of `tokens`. The KV of the first `num_cached` tokens is in the pages of `tables`.
    /// There is one table for each KV group, or none. The last page of a table may lack rows, which are copied or
    /// computed later. The executor is not given pages behind a window.
    pub fn begin_from(
        &mut self,
        slot: u32,
        script: &Script,
        tables: &[Vec<u32>],
        tokens: &[TokenId],
        num_cached: usize,
    ) -> Sequence {
        self.batch.start_slot(SlotStart {
            slot: SlotId(slot),
            request: RequestId(self.next_step << 32 | u64::from(slot)),
            sampling: script.sampling.clone(),
            num_prompt_tokens: script.prompt.len() as u32,
            cached_tokens: tokens[..num_cached].to_vec(),
            min_tokens: script.min_tokens,
            masked_until_min_tokens: Arc::from(&script.masked_until_min_tokens[..]),
            adapter: None,
            snapshot: None,
        });
        let mut own_tables = vec![Vec::new(); self.groups.len()];
        for (index, (table, own)) in tables.iter().zip(&mut own_tables).enumerate() {
            let first = self.first_page_read(index, num_cached).min(table.len());
            let pages = &table[first..];
            if !pages.is_empty() {
                self.batch.pages_of_group(slot, index, first, pages);
                own.resize(first, None);
                own.extend(pages.iter().copied().map(Some));
            }
        }
        Sequence {
            slot,
            script: script.clone(),
            tokens: tokens.to_vec(),
            num_computed: num_cached,
            tables: own_tables,
            samples: Vec::new(),
            logprobs: Vec::new(),
            hidden_state: None,
            num_asked: tokens.len() - script.prompt.len(),
            last_asked_step: 0,
        }
    }

    /// Makes the next step compute a chunk of the sequence, or one token.
    pub fn advance(&mut self, sequence: &mut Sequence, chunk: usize) {
        let total = sequence.script.num_tokens;
        let pooling = sequence.script.sampling.pooling;
        let is_asked = match pooling {
            Some(_) => sequence.num_computed == sequence.script.prompt.len(),
            None => sequence.num_asked == total,
        };
        if is_asked {
            return;
        }
        let start = sequence.num_computed;
        let num_known = sequence.tokens.len() - start;
        let len = num_known.clamp(1, chunk);
        let sample = len >= num_known;
        sequence.num_computed += len;
        self.take_pages(sequence, sequence.num_computed);
        if num_known == 0 {
            self.batch
                .span_from_step(sequence.slot, start, sequence.last_asked_step);
        } else {
            let tokens = &sequence.tokens[start..start + len];
            self.batch.span(sequence.slot, start, tokens, sample);
            sequence.ask_for_logprobs(start, start + len, &mut self.batch);
        }
        match pooling {
            Some(pooling) => {
                self.batch.pool(pooling, sample);
            }
            None if sample => self.ask(sequence, 0),
            None => {}
        }
    }

    /// Records that the next step draws a token for the sequence, and possibly `num_drafts` more after drafts.
    pub fn ask(&mut self, sequence: &mut Sequence, num_drafts: usize) {
        sequence.num_asked += 1;
        sequence.last_asked_step = self.next_step;
        self.asked.push((SlotId(sequence.slot), num_drafts));
    }

    /// Takes the missing pages of each KV group for the first `num_positions` positions.
    pub fn take_pages(&mut self, sequence: &mut Sequence, num_positions: usize) {
        let num_pages = num_positions.div_ceil(self.page_size);
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            let first = table.len();
            let new: Vec<u32> = (first..num_pages).map(|_| self.take_page()).collect();
            if !new.is_empty() {
                self.batch.pages_of_group(sequence.slot, group, first, &new);
                table.extend(new.into_iter().map(Some));
            }
        }
    }

    /// A table of `num_pages` new pages for each KV group.
    pub fn take_tables(&mut self, num_pages: usize) -> Vec<Vec<u32>> {
        let tables = 0..self.groups.len();
        let take = |_| (0..num_pages).map(|_| self.take_page()).collect();
        tables.map(take).collect()
    }

    fn first_page_read(&self, group: usize, position: usize) -> usize {
        let page_size = self.page_size as u32;
        self.groups[group].first_page_read(position as u32, page_size) as usize
    }

    /// Gives back the pages that no query of a sequence reads any more. The pages are overwritten at once, as another
    /// owner may do.
    fn give_back(&mut self, sequence: &mut Sequence) {
        let steps = self.inflight.iter().flat_map(|step| &step.starts);
        let starts = steps.filter(|(slot, _)| *slot == SlotId(sequence.slot));
        let first_query = starts.map(|(_, start)| *start as usize).min();
        let first_query = first_query.unwrap_or(sequence.num_computed);
        for group in 0..sequence.tables.len() {
            let first_read = self.first_page_read(group, first_query);
            for entry in sequence.tables[group].iter_mut().take(first_read) {
                if let Some(page) = entry.take() {
                    self.overwrite(page);
                    self.free_pages.push_front(page);
                }
            }
        }
    }

    fn overwrite(&self, page: u32) {
        let kv = self.executor.kv_pages();
        let bytes = vec![OVERWRITTEN; kv.geometry().layer_bytes()];
        for layer in 0..kv.geometry().num_layers {
            // SAFETY: neither a step in flight nor a later one reads the page.
            unsafe { kv.write(layer, &[PageId(page)], PageForm::Native, &bytes) };
        }
    }

    pub fn take_page(&mut self) -> u32 {
        let index = match &mut self.shuffle {
            None => 0,
            Some(state) => {
                *state = mix(*state, 0);
                *state as usize % self.free_pages.len().max(1)
            }
        };
        self.free_pages
            .remove(index)
            .expect("the pool has too few pages for the suite")
    }

    /// Reads pages layer by layer, page by page. Call it only while no step is in flight.
    pub fn read_pages(&self, pages: &[u32], form: PageForm) -> Vec<Vec<u8>> {
        let kv = self.executor.kv_pages();
        let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
        let layers = 0..kv.geometry().num_layers;
        let read = |layer| {
            let mut bytes = vec![0; pages.len() * kv.geometry().layer_bytes()];
            // SAFETY: no step is in flight, and the driver submits none meanwhile.
            unsafe { kv.read(layer, &pages, form, &mut bytes) };
            bytes
        };
        layers.map(read).collect()
    }

    /// Writes the result of `read_pages` into pages of no slot.
    pub fn write_pages(&self, pages: &[u32], form: PageForm, layers: &[Vec<u8>]) {
        let kv = self.executor.kv_pages();
        let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
        for (layer, bytes) in layers.iter().enumerate() {
            // SAFETY: the driver has taken the pages, and no batch has named them yet.
            unsafe { kv.write(layer as u32, &pages, form, bytes) };
        }
    }

    /// Frees the slot and its pages for the next batch.
    pub fn release(&mut self, sequence: Sequence) -> Sequence {
        self.release_slot(&sequence);
        self.free_pages.extend(sequence.pages());
        sequence
    }

    /// Frees the slot, but keeps the pages.
    pub fn release_slot(&mut self, sequence: &Sequence) {
        self.batch.release(sequence.slot);
    }

    pub fn allow_only(&mut self, slot: u32, vocab_size: usize, tokens: &[TokenId]) {
        let mut allowed = vec![0; vocab_size.div_ceil(32)];
        for &token in tokens {
            allowed[token as usize / 32] |= 1 << (token % 32);
        }
        self.masks.push(TokenMask {
            slot: SlotId(slot),
            allowed: allowed.into(),
        });
    }

    /// The next step to submit.
    pub fn next_step(&self) -> StepId {
        StepId(self.next_step)
    }

    pub fn submit(&mut self) {
        let batch = self.batch.build();
        let step = batch.step;
        assert_eq!(step.0, self.next_step);
        let starts = batch.spans.iter().map(|span| (span.slot, span.start));
        let starts = starts.collect();
        self.executor.submit(batch).expect("submit");
        self.executor
            .sample(step, std::mem::take(&mut self.masks))
            .expect("sample");
        self.inflight.push_back(Inflight {
            step: self.next_step,
            asked: std::mem::take(&mut self.asked),
            starts,
        });
        self.next_step += 1;
    }

    /// Waits for the oldest step in flight, and passes its samples to the sequences that asked for them. Returns the
    /// slots without a draw.
    pub fn receive<'a>(
        &mut self,
        sequences: impl IntoIterator<Item = &'a mut Sequence>,
    ) -> Vec<SlotId> {
        let output = self.wait().unwrap_or_else(|error| panic!("{error}"));
        let mut by_slot: BTreeMap<SlotId, Vec<Sample>> = BTreeMap::new();
        for (slot, sample) in output.samples {
            by_slot.entry(slot).or_default().push(sample);
        }
        let mut logprobs: BTreeMap<_, _> = output.logprobs.into_iter().collect();
        let mut hidden_states: BTreeMap<_, _> = output.hidden_states.into_iter().collect();
        for sequence in sequences {
            let scored = logprobs.remove(&SlotId(sequence.slot));
            sequence.logprobs.extend(scored.into_iter().flatten());
            if let Some(state) = hidden_states.remove(&SlotId(sequence.slot)) {
                assert!(sequence.hidden_state.is_none(), "a second hidden state");
                sequence.hidden_state = Some(state);
            }
            let samples = by_slot.remove(&SlotId(sequence.slot)).unwrap_or_default();
            // The step has also computed the rows of accepted drafts.
            let num_held = samples.len().saturating_sub(1);
            sequence.num_computed += num_held;
            sequence.num_asked += num_held;
            for sample in samples {
                sequence.tokens.push(sample.token);
                sequence.samples.push(sample);
            }
            if !self.keeps_pages {
                self.give_back(sequence);
            }
        }
        assert!(
            logprobs.is_empty(),
            "log-probabilities that no script asked for: {logprobs:?}"
        );
        assert!(
            hidden_states.is_empty(),
            "hidden states that no script asked for: {hidden_states:?}"
        );
        assert!(
            by_slot.is_empty(),
            "samples that no script asked for: {by_slot:?}"
        );
        output.undrawn.iter().map(|(slot, _)| *slot).collect()
    }

    pub fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let Inflight { step, asked, .. } = self.inflight.pop_front().expect("a step is in flight");
        let result = self.executor.wait();
        if let Ok(output) = &result {
            let mut drawn: Vec<SlotId> = output.samples.iter().map(|(slot, _)| *slot).collect();
            let undrawn: Vec<SlotId> = output.undrawn.iter().map(|(slot, _)| *slot).collect();
            assert_eq!(output.step, StepId(step), "steps return in order");
            for (slot, num_drafts) in &asked {
                let num_drawn = drawn.iter().filter(|drawn| *drawn == slot).count();
                assert!(
                    num_drawn <= 1 + num_drafts,
                    "one sample for each sampling span of step {step} and each draft: \
                     {num_drawn} for {num_drafts} drafts"
                );
            }
            drawn.dedup();
            let asked = asked.into_iter().map(|(slot, _)| slot);
            let (without, with): (Vec<_>, Vec<_>) = asked.partition(|slot| undrawn.contains(slot));
            assert_eq!(
                (drawn, undrawn),
                (with, without),
                "one sample for each sampling span of step {step}, in order"
            );
        }
        result
    }

    pub fn step(&mut self, sequences: &mut [&mut Sequence]) {
        self.submit();
        let undrawn = self.receive(sequences.iter_mut().map(|sequence| &mut **sequence));
        assert_eq!(undrawn, [], "everything can be drawn from");
    }

    /// Plays a sequence to its end, alone.
    pub fn finish(&mut self, sequence: &mut Sequence) {
        while !sequence.is_done() {
            self.advance(sequence, usize::MAX);
            self.step(&mut [sequence]);
        }
    }
}

impl Sequence {
    /// Makes the span that computes the tokens `start..end` return log-probabilities of the prompt, if the script asks
    /// for them.
    fn ask_for_logprobs(&self, start: usize, end: usize, batch: &mut BatchBuilder) {
        let prompt = &self.script.prompt;
        let positions = start as u32 + 1..prompt.len().min(end + 1) as u32;
        if self.script.sampling.prompt_logprobs.is_some() && !positions.is_empty() {
            batch.logprobs(positions, prompt.get(end).copied());
        }
    }

    /// The pages of all KV groups.
    pub fn pages(&self) -> impl Iterator<Item = u32> {
        self.tables.iter().flatten().copied().flatten()
    }

    /// The first `num_pages` pages of each KV group. The sequence has kept all of them.
    pub fn first_pages(&self, num_pages: usize) -> Vec<Vec<u32>> {
        let first = |table: &Vec<Option<u32>>| {
            let pages = table[..num_pages].iter().copied();
            pages.map(|page| page.expect("the page was kept")).collect()
        };
        self.tables.iter().map(first).collect()
    }

    pub fn is_done(&self) -> bool {
        if self.script.sampling.pooling.is_some() {
            return self.hidden_state.is_some();
        }
        self.tokens.len() == self.script.prompt.len() + self.script.num_tokens
    }
}
