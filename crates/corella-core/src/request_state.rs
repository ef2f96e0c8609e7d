//! What the scheduler knows about one request: counters, not phases.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::KnownPath;
use crate::cache::publication::Guest;
use crate::queue::page_forecast::Contribution;
use crate::step::speculation::Speculator;
use crate::{
    BlockId, FinishReason, PageId, Pooling, Request, RequestId, SlotId, SlotStart, StepId, TokenId,
    Yield,
};

/// 2^32 divided by the golden ratio: its multiples modulo 2^32 are spread evenly.
const GOLDEN_SHARE: u32 = 0x9e37_79b9;

/// The order in which running requests are planned. When pages run out, the last one is preempted
/// first. Waiting requests are queued in this order too; see
/// [`WaitingRank`](crate::queue::waiting_queue::WaitingRank).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// 0 for every request unless the policy is `priority`.
    pub priority: i32,
    pub arrival_us: u64,
    /// The number of requests that were submitted before this one.
    pub arrival: u64,
}

impl Rank {
    pub const FIRST: Self = Self {
        priority: i32::MIN,
        arrival_us: 0,
        arrival: 0,
    };
}

/// The state of a request. Its token positions, from left to right:
///
/// ```text
/// 0 ········ computed ········ scheduled ········ known ········ total
///   KV valid            in flight       to compute      drawn, in flight
/// ```
///
/// Prefill, a chunk of it, decode and a resumed request differ only in where these boundaries are.
#[derive(Debug)]
pub(crate) struct RequestState {
    /// The request as submitted, except that its prompt, and what was drawn for it elsewhere, have
    /// been moved to `tokens`.
    pub request: Request,
    pub rank: Rank,
    pub max_tokens: u32,
    /// How many output tokens it is expected to end with: the `quantile` of the lengths of all
    /// outputs.
    pub expected_output: u32,
    pub quantile: u32,
    /// What the forecast counts for it, while it runs or receives KV.
    pub contribution: Option<Contribution>,
    /// Whether only `max_tokens` can end it, so that the length of its output is known.
    pub is_length_known: bool,
    /// End and stop tokens, which must not be drawn before `min_tokens` are out.
    pub masked_until_min_tokens: Arc<[TokenId]>,

    /// The known tokens: the prompt, then the output that has returned.
    pub tokens: Vec<TokenId>,
    pub num_prompt_tokens: u32,
    /// The number of tokens at the beginning of the prompt whose log-probabilities have been emitted
    /// or are not wanted. The first token has none.
    pub num_scored_tokens: u32,
    /// Positions whose KV is in the pages, from prefix hits or from steps that have returned.
    pub num_computed_tokens: u32,
    /// Computed positions, and those that steps in flight will add.
    pub num_scheduled_tokens: u32,
    /// How many tokens were known when it took its slot. It is prefilling up to this position.
    pub prefill_end: u32,
    /// The number of steps in flight that name it, and how many of them draw a token for it.
    pub num_inflight_steps: u32,
    pub num_inflight_samples: u32,
    pub last_sample_step: StepId,
    /// Guesses that a step in flight computes behind the scheduled tokens. When the step returns,
    /// those that hold become known and computed; the others were never counted.
    pub drafts: Vec<TokenId>,
    /// What makes the guesses. `None` without speculation.
    pub speculator: Option<Speculator>,
    /// The step in which it took its slot.
    pub started_step: StepId,

    pub stage: Stage,
    pub slot: Option<SlotId>,
    pub tables: PageTables,
    /// How many pages of groups without a window were already in use when it took its slot.
    pub num_shared_pages: u32,
    /// How many blocks are published as its path in the prefix tree. In groups without a window, their
    /// pages are those of its tables.
    pub num_published_blocks: u32,
    /// The last of those blocks.
    pub path_end: Option<BlockId>,
    /// How far it goes on through blocks of other requests.
    pub guest: Option<Box<Guest>>,
    /// The most rows that may be in flight while it prefills, so that its windows fit into the pool.
    pub num_rows_at_once: u32,
    /// The time by which its KV must have arrived, while it is receiving.
    pub receipt_deadline_us: u64,
    /// Whether its prompt was computed on another node. It is never computed here.
    pub came_with_kv: bool,
    /// Pages of host memory that are set aside for it while it is leaving.
    pub num_spill_pages: u32,
    /// Pages that it exports to other nodes: 0 when nobody wants them.
    pub num_exporting_pages: u32,
    /// The first rows whose KV has been announced to those who want it elsewhere.
    pub num_exported_rows: u32,
    /// The pages that a step copies rows from, one of each group. They stay locked until that step has
    /// returned.
    pub donor: Option<(Vec<PageId>, StepId)>,

    /// Prompt tokens that were cached at its first admission. `None` until then.
    pub num_cached_tokens: Option<u32>,
    pub queue_us: Option<u64>,
    /// When its latency objectives should be checked again, while it waits for its first admission.
    pub late_us: Option<u64>,
    pub num_preemptions: u32,
    /// A number that grows with the time at which it began to wait. It takes a new one each time
    /// that it waits again, unless it has aged.
    pub ticket: u64,
    /// The number of rounds in which packing started requests behind it.
    pub num_passed_over: u32,
    /// It was passed over or preempted so often that `priority` and `lpm` start it before new
    /// requests, and that no more urgent request may preempt it.
    pub is_aged: bool,
    /// The step by which it should start, while it has aged and waits.
    pub due_step: Option<StepId>,
    /// While it follows a leader: who that is, and how many pages of its path the leader will
    /// publish.
    pub held_by: Option<(RequestIndex, u32)>,
    /// What was last found for it in the prefix tree, while it waits.
    pub known_path: KnownPath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Waiting,
    /// It has pages that somebody else fills, from another node or from host memory, and no slot.
    Receiving,
    /// Its KV is there, and it has no slot yet.
    Arrived,
    Running,
    /// It has left the running set, but steps in flight still name its slot and pages.
    Leaving(Leaving),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Its terminal output has been emitted. Results that still return are dropped.
    Finished,
    /// It keeps the results that still return, then waits again.
    Preempted,
    /// It has read undefined pages. Results that still return are dropped, then it waits again.
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
            contribution: None,
            is_length_known: stopping.end_token_ids.is_empty()
                && stopping.stop_token_ids.is_empty(),
            quantile: (rank.arrival as u32).wrapping_mul(GOLDEN_SHARE),
            rank,
            masked_until_min_tokens,
            num_prompt_tokens,
            num_scored_tokens: match (request.sampling.prompt_logprobs, request.sampling.pooling) {
                (Some(_), None) => 1,
                _ => num_prompt_tokens,
            },
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
            tables: PageTables::default(),
            num_shared_pages: 0,
            num_published_blocks: 0,
            path_end: None,
            guest: None,
            num_rows_at_once: u32::MAX,
            receipt_deadline_us: 0,
            came_with_kv: false,
            num_spill_pages: 0,
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

    /// The number of known tokens and of those that steps in flight draw.
    pub fn num_total_tokens(&self) -> u32 {
        self.num_known_tokens() + self.num_inflight_samples
    }

    /// Rows that its tokens need: the last token needs none.
    pub fn num_rows(&self) -> u32 {
        self.num_total_tokens() - 1
    }

    /// How many of its tokens may come from the prefix cache, or be awaited from a leader. The last
    /// one is always computed, because its logits or its hidden state are needed, and so are those
    /// before a token whose log-probability is wanted, and all of which the mean is wanted.
    pub fn max_cached_tokens(&self) -> usize {
        let last = self.tokens.len() - 1;
        if !self.request.takes_hits() {
            return 0;
        }
        match self.num_scored_tokens < self.num_prompt_tokens {
            true => last.min(self.num_scored_tokens as usize - 1),
            false => last,
        }
    }

    /// What a step returns if it computes the known tokens `start..end`, or one token behind them.
    pub fn yields(&self, start: u32, end: u32) -> Yield {
        if let Some(pooling) = self.request.sampling.pooling {
            return match pooling {
                _ if end == self.num_prompt_tokens => Yield::HiddenState(pooling),
                Pooling::LastToken => Yield::Nothing,
                Pooling::Mean => Yield::Sum,
            };
        }
        let draws = end == self.num_total_tokens() && self.max_tokens > 0;
        let positions =
            (start + 1).max(self.num_scored_tokens)..(end + 1).min(self.num_prompt_tokens);
        match (positions.is_empty(), draws) {
            (true, false) => Yield::Nothing,
            (true, true) => Yield::Draw,
            (false, _) => Yield::Logprobs {
                next: (positions.end == end + 1).then(|| self.tokens[end as usize]),
                positions,
                draws,
            },
        }
    }

    /// The pages that a step in flight copies rows from.
    pub fn donor_pages(&self) -> impl Iterator<Item = PageId> {
        let pages = self.donor.iter().flat_map(|(pages, _)| pages);
        pages.copied()
    }

    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    pub fn is_prefilling(&self) -> bool {
        self.num_scheduled_tokens < self.prefill_end
    }

    /// Whether its last token is yet to be computed and `max_tokens` allows another one.
    pub fn wants_decode(&self) -> bool {
        self.is_running()
            && !self.is_prefilling()
            && self.drafts.is_empty()
            && self.num_scheduled_tokens < self.num_total_tokens()
            && self.num_total_tokens() - self.num_prompt_tokens < self.max_tokens
    }

    /// Describes the request to an executor, for drawing its tokens.
    pub fn slot_start(&self, slot: SlotId, num_cached_tokens: usize) -> SlotStart {
        SlotStart {
            slot,
            request: self.request.id,
            sampling: self.request.sampling.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            cached_tokens: self.tokens[..num_cached_tokens].to_vec(),
            min_tokens: self.request.stopping.min_tokens,
            masked_until_min_tokens: self.masked_until_min_tokens.clone(),
            adapter: self.request.namespace.lora.clone(),
        }
    }

    /// Moves on to the next quantile of a low-discrepancy sequence: however many are taken, they
    /// are spread evenly.
    pub fn next_quantile(&mut self) {
        self.quantile = self.quantile.wrapping_add(GOLDEN_SHARE);
    }

    /// Whether it has never been admitted.
    pub fn is_new(&self) -> bool {
        self.num_cached_tokens.is_none()
    }

    /// The reason why the newest token ends the request, if it does.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        let newest = *self.tokens.last()?;
        let stopping = &self.request.stopping;
        stopping.finish_reason(newest, self.num_output_tokens(), self.max_tokens)
    }
}

/// The index of a live request in the `RequestTable`. It does not change while anything in flight
/// names the request.
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
    /// All of them by id.
    by_id: BTreeMap<RequestId, RequestIndex>,
    num_inserted: u64,
}

impl RequestTable {
    pub fn insert(&mut self, state: RequestState) -> RequestIndex {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            RequestIndex(self.entries.len() as u32 - 1)
        });
        self.by_id.insert(state.request.id, index);
        self.num_inserted += 1;
        self.entries[index.0 as usize] = Some(state);
        index
    }

    /// # Panics
    /// Panics when the request was removed before.
    pub fn remove(&mut self, index: RequestIndex) {
        self.unused.push(index);
        let state = self.entries[index.0 as usize].take();
        let state = state.expect("a request is removed from the table twice");
        self.by_id.remove(&state.request.id);
    }

    pub fn find(&self, id: RequestId) -> Option<RequestIndex> {
        self.by_id.get(&id).copied()
    }

    /// All requests in the order of their ids.
    pub fn indices(&self) -> impl Iterator<Item = RequestIndex> {
        self.by_id.values().copied()
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The number of requests that were ever inserted.
    pub fn num_inserted(&self) -> u64 {
        self.num_inserted
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
            .expect("an index names a request that has been removed")
    }
}

impl IndexMut<RequestIndex> for RequestTable {
    fn index_mut(&mut self, index: RequestIndex) -> &mut RequestState {
        self.entries[index.0 as usize]
            .as_mut()
            .expect("an index names a request that has been removed")
    }
}
