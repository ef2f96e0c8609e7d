//! An executor that computes nothing and distrusts every batch.
//!
//! A row of a page holds a hash of the namespace, the KV group and all tokens up to the row. A drawn token is a
//! function of the rows that the span can see: in each KV group, the rows within the window. If a span reads a row of
//! another history, a real model would draw other tokens than in a lone run, so the executor panics. Nodes of different
//! arithmetics compute different rows of the same tokens, so a row also names the arithmetic of its node. Recurrent
//! layers have a state for each slot (`StateTable`). The rows of a failed step are undefined, and so are the draws from
//! them: the scheduler must not emit such draws. `BatchCheck` checks conflicts with steps in flight, as in the mock
//! executor.

pub(crate) mod host_memory;
pub(crate) mod state_table;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use corella_core::{
    Batch, BatchOutput, HiddenState, InputToken, Logprobs, Namespace, PageId, Pooling,
    PromptLogprob, Request, RequestId, Sample, SchedulerConfig, SlotId, SnapshotId, Span, StepId,
    TokenId, Yield,
};
use corella_model::{BatchCheck, MeanPool};

use crate::executor::state_table::StateTable;
use crate::random::mix;

/// The token that is drawn from undefined rows.
pub const UNDEFINED: TokenId = TokenId::MAX;

/// The entry in `writers` for a page that was last written from outside, not by a slot.
const OUTSIDE: u64 = u64::MAX;

pub type Row = Option<u64>;

pub struct CheckingExecutor {
    config: SchedulerConfig,
    alphabet: u32,
    /// The hash that precedes each request's first row.
    roots: BTreeMap<RequestId, u64>,
    /// The id of this node's arithmetic.
    arithmetic: u64,
    /// For each request whose first rows another node makes, that node's arithmetic and the number of these rows.
    foreign: BTreeMap<RequestId, (u64, usize)>,
    pages: Vec<Vec<Row>>,
    /// For each page, `Slot::start` of the slot that last wrote to it.
    writers: Vec<u64>,
    /// `None` for a model without recurrent layers.
    states: Option<StateTable>,
    slots: BTreeMap<SlotId, Slot>,
    drawn: BTreeMap<(StepId, SlotId), TokenId>,
    check: BatchCheck,
    num_started: u64,
    inflight: VecDeque<Inflight>,
    /// The rows that the last batch has written.
    written: BTreeSet<(PageId, usize)>,
}

struct Slot {
    /// The index of this start among all starts of slots.
    start: u64,
    request: RequestId,
    root: Row,
    /// The page table of each KV group. `None` entries are outside the group's window.
    tables: Vec<Vec<Option<PageId>>>,
    /// The hash after each token of the history.
    history: Vec<Row>,
    num_cached_tokens: usize,
    num_prompt_tokens: usize,
    min_tokens: usize,
    masked: Arc<[TokenId]>,
    mean: MeanPool,
}

struct Inflight {
    output: BatchOutput,
    fails: bool,
    requests: BTreeSet<RequestId>,
    undrawn: BTreeSet<RequestId>,
    /// Snapshots that the step takes or restores.
    snapshots: Vec<SnapshotId>,
}

/// The outcome of the oldest step in flight. The set has the requests without a draw, or the failed step's requests.
pub enum Returned {
    Output(BatchOutput, BTreeSet<RequestId>),
    Failed(StepId, BTreeSet<RequestId>),
}

impl CheckingExecutor {
    pub fn new(config: &SchedulerConfig, alphabet: u32, roots: BTreeMap<RequestId, u64>) -> Self {
        let page = vec![None; config.page_size as usize];
        Self {
            config: config.clone(),
            alphabet,
            roots,
            arithmetic: 0,
            foreign: BTreeMap::new(),
            pages: vec![page; config.num_pages as usize],
            writers: vec![0; config.num_pages as usize],
            states: config.recurrent_state.as_ref().map(StateTable::new),
            slots: BTreeMap::new(),
            drawn: BTreeMap::new(),
            check: BatchCheck::new(config.page_size, &config.kv_groups),
            num_started: 0,
            inflight: VecDeque::new(),
            written: BTreeSet::new(),
        }
    }

    pub fn set_arithmetic(&mut self, arithmetic: u64) {
        self.arithmetic = arithmetic;
    }

    /// Notes that a node of this arithmetic makes the first rows of a request.
    pub fn add_foreign(&mut self, request: RequestId, arithmetic: u64, num_rows: usize) {
        if arithmetic != self.arithmetic {
            self.foreign.insert(request, (arithmetic, num_rows));
        }
    }

    /// Returns a row as this node computes it for a group.
    pub fn made_here(&self, row: Row, group: usize) -> Row {
        made_by(self.arithmetic, in_group(row, group))
    }

    /// Sets the hash before the first row of a request.
    pub fn add_root(&mut self, request: RequestId, root: u64) {
        self.roots.insert(request, root);
    }

    /// Returns a row as a reader outside the executor sees it.
    pub fn read_row(&self, page: PageId, at: usize) -> Row {
        self.pages[page.0 as usize][at]
    }

    /// Takes the rows that the last batch has written, by page and offset.
    pub fn take_written(&mut self) -> BTreeSet<(PageId, usize)> {
        std::mem::take(&mut self.written)
    }

    /// Writes a row from outside. No step in flight may read it.
    pub fn write_row(&mut self, page: PageId, at: usize, row: Row) {
        if let Err(reason) = self.check.check_write(page) {
            panic!("{reason}");
        }
        self.writers[page.0 as usize] = OUTSIDE;
        self.pages[page.0 as usize][at] = row;
    }

    /// Returns a snapshot as another node reads it. No step in flight may name the snapshot.
    pub fn read_state(&self, id: SnapshotId) -> Row {
        self.check_at_rest(id);
        self.states.as_ref().and_then(|states| states.read(id))
    }

    /// Writes a snapshot from outside. No step in flight may name the snapshot.
    pub fn write_state(&mut self, id: SnapshotId, state: Row) {
        self.check_at_rest(id);
        let states = self.states.as_mut();
        states
            .expect("the model has recurrent layers")
            .write(id, state);
    }

    fn check_at_rest(&self, id: SnapshotId) {
        let mut named = self.inflight.iter().flat_map(|step| &step.snapshots);
        assert!(
            !named.any(|&named| named == id),
            "snapshot {id} is read or written from outside, and a step in flight names it"
        );
    }

    /// Runs a batch. `undrawn` is the index of a span with undefined logits: all rows that this span's request has
    /// computed since it took its slot become undefined, too.
    pub fn submit(&mut self, batch: &Batch, fails: bool, undrawn: Option<usize>) {
        self.written.clear();
        self.check_limits(batch);
        if let Err(reason) = self.check.submit(batch) {
            panic!("{reason}");
        }
        self.apply_slots(batch);
        self.apply_tables(batch);
        self.apply_copies(batch);
        for span in &batch.spans {
            self.write_span(batch, span, fails);
        }
        let spans = batch.spans.iter();
        let drawn: Vec<_> = spans.map(|span| self.attend(batch, span)).collect();
        let (mut samples, mut failed) = (Vec::new(), Vec::new());
        let (mut logprobs, mut hidden_states) = (Vec::new(), Vec::new());
        for (index, (span, tokens)) in batch.spans.iter().zip(drawn).enumerate() {
            let state = self.pool(span, tokens[0] != UNDEFINED);
            if span.yields.returns() && undrawn == Some(index) {
                self.poison(span.slot);
                self.drawn.insert((batch.step, span.slot), UNDEFINED);
                failed.push((span.slot, "injected".into()));
                continue;
            }
            hidden_states.extend(state.map(|state| (span.slot, state)));
            if span.yields.num_logprobs() > 0 {
                let is_defined = tokens[0] != UNDEFINED;
                logprobs.push((span.slot, self.score(batch, span, is_defined)));
            }
            if span.yields.draws() {
                self.reject_drafts(span, tokens.len());
                for token in tokens {
                    self.drawn.insert((batch.step, span.slot), token);
                    let sample = Sample {
                        token,
                        logprobs: None,
                    };
                    samples.push((span.slot, sample));
                }
            }
        }
        if let Some(states) = &mut self.states {
            states.take_snapshots(batch);
        }
        let request = |(slot, _): &(SlotId, Box<str>)| self.slots[slot].request;
        let undrawn_requests = failed.iter().map(request).collect();
        let named = batch.spans.iter().map(|span| &self.slots[&span.slot]);
        let taken = batch.snapshots.iter().map(|taken| taken.to);
        let restored = batch.started.iter().filter_map(|start| start.snapshot);
        let inflight = Inflight {
            snapshots: taken.chain(restored).collect(),
            output: BatchOutput {
                step: batch.step,
                samples,
                logprobs,
                hidden_states,
                undrawn: failed,
            },
            fails,
            undrawn: undrawn_requests,
            requests: named.map(|slot| slot.request).collect(),
        };
        self.inflight.push_back(inflight);
    }

    pub fn wait(&mut self) -> Returned {
        let returned = self
            .inflight
            .pop_front()
            .expect("the executor waits while no step is in flight");
        self.check.end_step();
        if returned.fails {
            Returned::Failed(returned.output.step, returned.requests)
        } else {
            Returned::Output(returned.output, returned.undrawn)
        }
    }

    /// Returns the output of a lone run, which any schedule must produce.
    pub fn lone_run(
        alphabet: u32,
        root: u64,
        prompt: &[TokenId],
        num_tokens: usize,
        masked: &[TokenId],
        min_tokens: usize,
    ) -> Vec<TokenId> {
        let mut hash = prompt
            .iter()
            .try_fold(root, |row, &token| next_row(Some(row), token));
        let mut output = Vec::new();
        while output.len() < num_tokens {
            let masked = if output.len() < min_tokens {
                masked
            } else {
                &[]
            };
            let token = draw(hash, alphabet, masked);
            output.push(token);
            hash = next_row(hash, token);
        }
        output
    }

    fn check_limits(&self, batch: &Batch) {
        let config = &self.config;
        assert!(!batch.spans.is_empty(), "the batch is empty");
        assert!(batch.num_tokens() <= config.max_num_batched_tokens as usize);
        for span in &batch.spans {
            let num_drafts = span.num_drafts as usize;
            assert!(num_drafts <= config.max_draft_tokens as usize);
            assert!(num_drafts < span.tokens.len() && (span.yields.draws() || num_drafts == 0));
        }
    }

    fn apply_slots(&mut self, batch: &Batch) {
        for slot in &batch.released {
            assert!(
                self.slots.remove(slot).is_some(),
                "slot {slot} is released without having been started"
            );
            if let Some(states) = &mut self.states {
                states.release(*slot);
            }
        }
        for start in &batch.started {
            let before = self.slots.get(&start.slot);
            assert!(before.is_none(), "slot {} is taken", start.slot);
            assert!(start.slot.0 < self.config.max_num_seqs);
            let root = Some(self.roots[&start.request]);
            let mut row = root;
            let history = start.cached_tokens.iter().map(|&token| {
                row = next_row(row, token);
                row
            });
            let history: Vec<_> = history.collect();
            match &mut self.states {
                Some(states) => states.start(start, history.last().copied().unwrap_or(root)),
                None => assert!(
                    start.snapshot.is_none(),
                    "the model has no recurrent layers"
                ),
            }
            let slot = Slot {
                start: self.num_started,
                request: start.request,
                root,
                tables: vec![Vec::new(); self.config.kv_groups.len()],
                history,
                num_cached_tokens: start.cached_tokens.len(),
                num_prompt_tokens: start.num_prompt_tokens as usize,
                min_tokens: start.min_tokens as usize,
                masked: start.masked_until_min_tokens.clone(),
                mean: MeanPool::default(),
            };
            self.num_started += 1;
            self.slots.insert(start.slot, slot);
        }
    }

    fn apply_tables(&mut self, batch: &Batch) {
        for delta in &batch.tables {
            let slot = self
                .slots
                .get_mut(&delta.slot)
                .expect("a slot that was never started changes its page table");
            let group = delta.group.0 as usize;
            let table = &mut slot.tables[group];
            if table.is_empty() && self.config.kv_groups[group].window.is_some() {
                table.resize(delta.first as usize, None);
            }
            assert_eq!(
                table.len(),
                delta.first as usize,
                "a page table changes other than by growing"
            );
            table.extend(batch.delta_pages(delta).iter().copied().map(Some));
        }
    }

    fn apply_copies(&mut self, batch: &Batch) {
        for copy in &batch.copies {
            let num_rows = copy.num_rows as usize;
            assert!(num_rows > 0 && num_rows < self.config.page_size as usize);
            let rows = self.pages[copy.from.0 as usize][..num_rows].to_vec();
            self.pages[copy.to.0 as usize][..num_rows].copy_from_slice(&rows);
            self.written.extend((0..num_rows).map(|at| (copy.to, at)));
        }
    }

    fn write_span(&mut self, batch: &Batch, span: &Span, fails: bool) {
        let slot = &self.slots[&span.slot];
        let start = slot.start;
        assert_eq!(
            span.start as usize,
            slot.history.len(),
            "a span does not begin where its slot's history ends"
        );
        for input in batch.span_tokens(span) {
            let token = match *input {
                InputToken::Known(token) => token,
                InputToken::FromStep { step, slot } => {
                    assert_eq!(slot, span.slot);
                    *self
                        .drawn
                        .get(&(step, slot))
                        .expect("a span takes a token that its step has not drawn")
                }
            };
            let slot = self.slots.get_mut(&span.slot).unwrap();
            let before = slot.history.last().copied().unwrap_or(slot.root);
            let row = next_row(before, token);
            let position = slot.history.len();
            slot.history.push(row);
            if let Some(states) = &mut self.states {
                states.push(span.slot, token, fails);
            }
            let page_size = self.config.page_size as usize;
            let pages = slot.pages_of(position / page_size);
            let at = position % page_size;
            for (group, page) in pages.into_iter().enumerate() {
                let row = made_by(self.arithmetic, in_group(row, group));
                self.pages[page.0 as usize][at] = if fails { None } else { row };
                self.writers[page.0 as usize] = start;
                self.written.insert((page, at));
            }
        }
    }

    fn poison(&mut self, slot: SlotId) {
        if let Some(states) = &mut self.states {
            states.poison(slot);
        }
        let slot = &self.slots[&slot];
        let page_size = self.config.page_size as usize;
        for position in slot.num_cached_tokens..slot.history.len() {
            let pages = slot
                .tables
                .iter()
                .filter_map(|table| table[position / page_size]);
            // Another slot may own a page that fell out of a window.
            for page in pages.filter(|page| self.writers[page.0 as usize] == slot.start) {
                self.pages[page.0 as usize][position % page_size] = None;
            }
        }
    }

    /// Undoes rejected drafts. Their rows must not be read, and the slot overwrites them.
    fn reject_drafts(&mut self, span: &Span, num_drawn: usize) {
        let page_size = self.config.page_size as usize;
        let slot = self
            .slots
            .get_mut(&span.slot)
            .expect("a span names a slot that was never started");
        let num_rejected = span.num_drafts as usize + 1 - num_drawn;
        let num_tokens = slot.history.len() - num_rejected;
        for position in num_tokens..slot.history.len() {
            for page in slot.pages_of(position / page_size) {
                self.pages[page.0 as usize][position % page_size] = None;
            }
        }
        slot.history.truncate(num_tokens);
        if let Some(states) = &mut self.states {
            states.truncate(span.slot, num_tokens);
        }
    }

    /// Reads all rows that the span sees. Draws a token after the span's last token that is not a draft, and after each
    /// accepted draft.
    fn attend(&self, batch: &Batch, span: &Span) -> Vec<TokenId> {
        let history = &self.slots[&span.slot].history;
        let mut num_tokens = history.len() - span.num_drafts as usize;
        let mut drawn = vec![self.draw_behind(span, num_tokens)];
        for draft in batch.span_drafts(span) {
            if drawn.last().copied().map(InputToken::Known) != Some(*draft) {
                break;
            }
            num_tokens += 1;
            drawn.push(self.draw_behind(span, num_tokens));
        }
        drawn
    }

    /// Adds the rows of a span to its slot's mean, if the span yields a hidden state. Returns the hidden state if the
    /// span completes it.
    fn pool(&mut self, span: &Span, is_defined: bool) -> Option<HiddenState> {
        let (start, end) = (
            span.start as usize,
            (span.start as usize + span.tokens.len()),
        );
        let slot = self.slots.get_mut(&span.slot)?;
        let is_summed = matches!(span.yields, Yield::Sum | Yield::HiddenState(Pooling::Mean));
        if is_summed {
            for (position, row) in slot.history.iter().enumerate().take(end).skip(start) {
                slot.mean.add(position, &[hidden_value(row.unwrap_or(0))]);
            }
        }
        let state = match span.yields {
            Yield::HiddenState(Pooling::Mean) => slot.mean.mean(end).expect("rows were left out"),
            Yield::HiddenState(Pooling::LastToken) => {
                [hidden_value(slot.history[end - 1].unwrap_or(0))].into()
            }
            _ => return None,
        };
        // A negative value is no mean of hidden values, which are positive.
        Some(if is_defined { state } else { [-1.0].into() })
    }

    /// Returns the log-probabilities of a span's tokens, from the rows before them.
    fn score(&self, batch: &Batch, span: &Span, is_defined: bool) -> Vec<PromptLogprob> {
        let Yield::Logprobs {
            positions, next, ..
        } = &span.yields
        else {
            return Vec::new();
        };
        let end = span.start + span.tokens.len() as u32;
        assert!(span.start < positions.start && positions.end <= end + 1);
        assert_eq!(next.is_some(), positions.end == end + 1);
        let history = &self.slots[&span.slot].history;
        let score = |position: u32| {
            let own = batch
                .span_tokens(span)
                .get((position - span.start) as usize);
            let token = match (own, next) {
                (Some(InputToken::Known(token)), _) | (None, Some(token)) => *token,
                _ => panic!("a token of a prompt is not known"),
            };
            let row = history[position as usize - 1].filter(|_| is_defined);
            PromptLogprob {
                token,
                logprobs: Logprobs {
                    token: 0.0,
                    rank: row.map_or(0, |row| rank(row, token)),
                    top: Vec::new(),
                },
            }
        };
        positions.clone().map(score).collect()
    }

    fn draw_behind(&self, span: &Span, num_tokens: usize) -> TokenId {
        let slot = &self.slots[&span.slot];
        let page_size = self.config.page_size as usize;
        let history = &slot.history[..num_tokens];
        // Undefined rows before the windows are not read, so they do not matter.
        let mut is_defined = history.last().is_some_and(Option::is_some);
        for (group, kv_group) in self.config.kv_groups.iter().enumerate() {
            let first = kv_group.first_row_read(span.start) as usize;
            let (other, num_foreign) = self
                .foreign
                .get(&slot.request)
                .copied()
                .unwrap_or((self.arithmetic, 0));
            for (position, &expected) in history.iter().enumerate().skip(first) {
                let page = slot.page(group, position / page_size);
                let row = self.pages[page.0 as usize][position % page_size];
                let maker = match position < num_foreign {
                    true => other,
                    false => self.arithmetic,
                };
                match (row, made_by(maker, in_group(expected, group))) {
                    (Some(row), Some(expected)) => assert_eq!(
                        row, expected,
                        "request {} reads a foreign row at position {position}, page {page} of \
                         group {group}",
                        slot.request
                    ),
                    _ => is_defined = false,
                }
            }
        }
        if let Some(states) = &self.states {
            is_defined &= states.behind(span.slot, num_tokens).is_some();
        }
        if !is_defined {
            return UNDEFINED;
        }
        let last = *history.last().unwrap();
        let num_output_tokens = num_tokens.saturating_sub(slot.num_prompt_tokens);
        let masked: &[TokenId] = if num_output_tokens < slot.min_tokens {
            &slot.masked
        } else {
            &[]
        };
        draw(last, self.alphabet, masked)
    }
}

impl Slot {
    fn page(&self, group: usize, at: usize) -> PageId {
        let page = self.tables[group].get(at).copied().flatten();
        page.unwrap_or_else(|| {
            let request = self.request;
            panic!("request {request} has no page {at} in group {group} within its window")
        })
    }

    /// Returns the pages of all groups at one entry of the tables.
    fn pages_of(&self, at: usize) -> Vec<PageId> {
        let groups = 0..self.tables.len();
        groups.map(|group| self.page(group, at)).collect()
    }
}

/// Returns a row as a group's layers compute it. Groups have different layers, so their rows differ.
pub fn in_group(row: Row, group: usize) -> Row {
    row.map(|row| row.wrapping_add(group as u64))
}

/// Returns a row as nodes of this arithmetic compute it.
fn made_by(arithmetic: u64, row: Row) -> Row {
    row.map(|row| row.wrapping_add(arithmetic << 32))
}

/// Returns the hash before the first row of a namespace. An adapter changes the rows of equal tokens. So does a salt
/// here, unlike in a real model, because rows must not be shared across salts.
pub fn root_row(namespace: &Namespace) -> u64 {
    let names = [&namespace.lora, &namespace.cache_salt];
    names.into_iter().fold(0, |root, name| {
        let name = name.as_ref().map_or(0, |name| 1 + name.len() as u64);
        mix(root ^ name)
    })
}

/// The rows of a sequence.
pub fn rows_of(root: u64, tokens: &[TokenId]) -> Vec<Row> {
    let mut row = Some(root);
    let rows = tokens.iter().map(|&token| {
        row = next_row(row, token);
        row
    });
    rows.collect()
}

/// Returns the expected tokens and ranks for a request's prompt.
pub fn lone_scores(request: &Request) -> Vec<(TokenId, u32)> {
    if request.sampling.prompt_logprobs.is_none() {
        return Vec::new();
    }
    let rows = rows_of(root_row(&request.namespace), &request.prompt);
    let behind = request.prompt.iter().skip(1).zip(rows);
    behind
        .map(|(&token, row)| (token, rank(row.unwrap_or(0), token)))
        .collect()
}

/// Returns the expected hidden state of a request.
pub fn lone_hidden_state(request: &Request) -> Option<f32> {
    let pooling = request.sampling.pooling?;
    let rows = rows_of(root_row(&request.namespace), &request.prompt);
    let values = rows
        .iter()
        .map(|row| f64::from(hidden_value(row.unwrap_or(0))));
    let values: Vec<f64> = values.collect();
    Some(match pooling {
        Pooling::LastToken => *values.last()? as f32,
        Pooling::Mean => (values.iter().sum::<f64>() / values.len() as f64) as f32,
        Pooling::FirstToken => *values.first()? as f32,
        Pooling::Max => values.into_iter().reduce(f64::max)? as f32,
    })
}

/// Returns an integer of 24 bits, so that sums are exact in an f64.
fn hidden_value(row: u64) -> f32 {
    (mix(row ^ 0x41dd) >> 40) as f32
}

/// Returns a rank above 0, made from the row before a token and the token.
fn rank(row: u64, token: TokenId) -> u32 {
    1 + mix(row ^ u64::from(token)) as u32 / 2
}

pub fn next_row(row: Row, token: TokenId) -> Row {
    let row = row?;
    (token != UNDEFINED).then(|| mix(row.wrapping_add(u64::from(token) + 1)))
}

fn draw(row: Row, alphabet: u32, masked: &[TokenId]) -> TokenId {
    let Some(row) = row else {
        return UNDEFINED;
    };
    let mut token = (mix(row ^ 0x5eed) % u64::from(alphabet)) as TokenId;
    while masked.contains(&token) {
        token = (token + 1) % alphabet;
    }
    token
}
