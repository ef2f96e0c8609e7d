//! What the scheduler knows of one request: counters, not phases.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use crate::prefix_tree::KnownPath;
use crate::speculation::Speculator;
use crate::{FinishReason, PageId, Request, SlotId, SlotStart, StepId, TokenId};

/// The golden ratio's share of 2^32: its multiples modulo 2^32 are spread evenly.
const GOLDEN_SHARE: u32 = 0x9e37_79b9;

/// Order of being served; the last is preempted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// 0 for all where priorities do not count.
    pub priority: i32,
    pub arrival_us: u64,
    /// Order of submission.
    pub arrival: u64,
}

impl Rank {
    pub const FIRST: Self = Self {
        priority: i32::MIN,
        arrival_us: 0,
        arrival: 0,
    };
}

/// Positions of a request, left to right:
///
/// ```text
/// 0 ········ computed ········ scheduled ········ known ········ total
///   KV valid            in flight       to compute      drawn, in flight
/// ```
///
/// Prefill, a chunk of it, decode and a resumed request differ only in where these stand.
#[derive(Debug)]
pub(crate) struct RequestState {
    /// Without its prompt and what was drawn elsewhere: those are the beginning of `tokens`.
    pub request: Request,
    pub rank: Rank,
    pub max_tokens: u32,
    /// Output tokens that it is expected to end with, by this quantile of all outputs.
    pub expected_output: u32,
    pub quantile: u32,
    /// Pages that it has with as many.
    pub num_expected_pages: u32,
    /// Nothing but its limit ends it, so that its output will be as long as that.
    pub is_length_known: bool,
    /// End and stop tokens while `min_tokens` hold.
    pub masked_until_min_tokens: Arc<[TokenId]>,

    /// The prompt, then the output that has returned: the known tokens.
    pub tokens: Vec<TokenId>,
    pub num_prompt_tokens: u32,
    /// KV that returned steps or prefix hits have left in the pages.
    pub num_computed_tokens: u32,
    /// The same and what steps in flight will add.
    pub num_scheduled_tokens: u32,
    /// Tokens known when it took its slot. Up to here it is prefilling.
    pub prefill_end: u32,
    /// Steps in flight that name it, and those of them that draw a token for it.
    pub num_inflight_steps: u32,
    pub num_inflight_samples: u32,
    pub last_sample_step: StepId,
    /// Guesses that a step in flight computes behind the scheduled tokens. Those that hold become
    /// known and computed when it returns; the others were never counted.
    pub drafts: Vec<TokenId>,
    /// `None` when nobody guesses.
    pub speculator: Option<Speculator>,
    /// In which it took its slot.
    pub started_step: StepId,

    pub stage: Stage,
    pub slot: Option<SlotId>,
    pub table: Vec<PageId>,
    /// The first pages of the table that the prefix tree had when it took its slot.
    pub num_shared_pages: u32,
    /// The first pages of the table that are in the prefix tree, as a path from its root.
    pub num_published_pages: u32,
    /// While it is receiving: when its KV must have arrived.
    pub receipt_deadline_us: u64,
    /// Pages that it exports to other nodes: 0 when nobody wants them.
    pub num_exporting_pages: u32,
    /// The first rows whose KV has been announced to those who want it elsewhere.
    pub num_exported_rows: u32,
    /// A page whose rows a step copies, locked until that step has returned.
    pub donor: Option<(PageId, StepId)>,

    /// Of the prompt, at first admission.
    pub num_cached_tokens: Option<u32>,
    pub queue_us: Option<u64>,
    /// While it waits with an objective: when it should be looked at again.
    pub late_us: Option<u64>,
    pub num_preemptions: u32,
    /// Its place among all that have begun to wait, by the time when they did.
    pub ticket: u64,
    /// Rounds in which packing started later ones.
    pub num_passed_over: u32,
    /// It has been passed over so often that it is owed its turn, and keeps it.
    pub is_aged: bool,
    /// While it waits for a turn that it is owed: when it should start.
    pub due_step: Option<StepId>,
    /// While it waits: the leader that computes what it needs next, and how many pages of its
    /// path that leader will publish.
    pub held_by: Option<(RequestIndex, u32)>,
    /// While it waits: what it was last found to have in the prefix tree.
    pub known_path: KnownPath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Waiting,
    /// It has pages that somebody else fills, and no slot.
    Receiving,
    /// Its KV is there, and it has no slot yet.
    Arrived,
    Running,
    /// Out of the running set; steps in flight still name its slot and pages.
    Leaving(Leaving),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Its terminal output is out; what returns is dropped.
    Finished,
    /// It keeps what returns, then waits again.
    Preempted,
    /// It read pages of a failed step: what returns is dropped, then it waits again.
    Reset,
}

impl RequestState {
    pub fn new(mut request: Request, rank: Rank, max_tokens: u32) -> Self {
        let mut tokens = core::mem::take(&mut request.prompt);
        let num_prompt_tokens = tokens.len() as u32;
        tokens.append(&mut request.output);
        let stopping = &request.stopping;
        let masked_until_min_tokens = if stopping.min_tokens > 0 {
            let stops = stopping
                .end_token_ids
                .iter()
                .chain(&stopping.stop_token_ids);
            stops.copied().collect()
        } else {
            Arc::default()
        };
        Self {
            max_tokens,
            expected_output: 0,
            num_expected_pages: 0,
            is_length_known: stopping.end_token_ids.is_empty()
                && stopping.stop_token_ids.is_empty(),
            quantile: (rank.arrival as u32).wrapping_mul(GOLDEN_SHARE),
            rank,
            masked_until_min_tokens,
            num_prompt_tokens,
            tokens,
            num_computed_tokens: 0,
            num_scheduled_tokens: 0,
            prefill_end: 0,
            num_inflight_steps: 0,
            num_inflight_samples: 0,
            last_sample_step: StepId(0),
            drafts: Vec::new(),
            speculator: None,
            started_step: StepId(0),
            stage: Stage::Waiting,
            slot: None,
            table: Vec::new(),
            num_shared_pages: 0,
            num_published_pages: 0,
            receipt_deadline_us: 0,
            num_exporting_pages: 0,
            num_exported_rows: 0,
            donor: None,
            num_cached_tokens: None,
            queue_us: None,
            late_us: None,
            num_preemptions: 0,
            ticket: 0,
            num_passed_over: 0,
            is_aged: false,
            due_step: None,
            held_by: None,
            known_path: KnownPath::default(),
            request,
        }
    }

    pub fn num_known_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn num_output_tokens(&self) -> u32 {
        self.num_known_tokens() - self.num_prompt_tokens
    }

    /// Known tokens and those that steps in flight draw.
    pub fn num_total_tokens(&self) -> u32 {
        self.num_known_tokens() + self.num_inflight_samples
    }

    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    pub fn is_prefilling(&self) -> bool {
        self.num_scheduled_tokens < self.prefill_end
    }

    /// Its last token awaits computing, and `max_tokens` leave room for the next.
    pub fn wants_decode(&self) -> bool {
        self.is_running()
            && !self.is_prefilling()
            && self.drafts.is_empty()
            && self.num_scheduled_tokens < self.num_total_tokens()
            && self.num_total_tokens() - self.num_prompt_tokens < self.max_tokens
    }

    /// What an executor must know to draw its tokens.
    pub fn slot_start(&self, slot: SlotId, num_cached_tokens: usize) -> SlotStart {
        SlotStart {
            slot,
            request: self.request.id,
            sampling: self.request.sampling.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            cached_tokens: self.tokens[..num_cached_tokens].to_vec(),
            min_tokens: self.request.stopping.min_tokens,
            masked_until_min_tokens: self.masked_until_min_tokens.clone(),
        }
    }

    /// Moves on in a sequence that is spread evenly however many of its members are taken.
    pub fn next_quantile(&mut self) {
        self.quantile = self.quantile.wrapping_add(GOLDEN_SHARE);
    }

    /// It waits and has not run yet.
    pub fn is_new(&self) -> bool {
        self.num_cached_tokens.is_none()
    }

    /// Why the newest token ends the request, if it does.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        let stopping = &self.request.stopping;
        let token = self.tokens.last()?;
        let may_stop = self.num_output_tokens() > stopping.min_tokens;
        if may_stop && stopping.end_token_ids.contains(token) {
            Some(FinishReason::EndToken)
        } else if may_stop && stopping.stop_token_ids.contains(token) {
            Some(FinishReason::StopToken)
        } else if self.num_output_tokens() >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// A live request's place in the `RequestTable`, fixed until nothing in flight names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestIndex(u32);

impl RequestIndex {
    pub const FIRST: Self = Self(0);
    pub const LAST: Self = Self(u32::MAX);
}

/// All live requests.
#[derive(Debug, Default)]
pub(crate) struct RequestTable {
    entries: Vec<Option<RequestState>>,
    unused: Vec<RequestIndex>,
}

impl RequestTable {
    pub fn insert(&mut self, state: RequestState) -> RequestIndex {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            RequestIndex(self.entries.len() as u32 - 1)
        });
        self.entries[index.0 as usize] = Some(state);
        index
    }

    pub fn remove(&mut self, index: RequestIndex) -> RequestState {
        self.unused.push(index);
        self.entries[index.0 as usize]
            .take()
            .expect("a request is removed once")
    }

    pub fn get(&self, index: RequestIndex) -> Option<&RequestState> {
        self.entries[index.0 as usize].as_ref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.entries.iter().flatten()
    }
}

impl Index<RequestIndex> for RequestTable {
    type Output = RequestState;

    fn index(&self, index: RequestIndex) -> &RequestState {
        self.entries[index.0 as usize]
            .as_ref()
            .expect("an index names a live request")
    }
}

impl IndexMut<RequestIndex> for RequestTable {
    fn index_mut(&mut self, index: RequestIndex) -> &mut RequestState {
        self.entries[index.0 as usize]
            .as_mut()
            .expect("an index names a live request")
    }
}
