//! The scheduler's state of one request.

/// Methods of a request that return a field of one of its parts.
macro_rules! reads {
    ($part:ident: $($field:ident: $type:ty),+ $(,)?) => {
        $(pub fn $field(&self) -> $type {
            self.$part.$field
        })+
    };
}

mod allocation;
mod expectation;
mod index;
mod invariant;
mod path;
mod progress;
mod table;
mod turn;

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::draft::speculator::Speculator;
use crate::request_state::allocation::Allocation;
use crate::request_state::expectation::Expectation;
use crate::request_state::path::Path;
use crate::request_state::progress::Progress;
use crate::request_state::turn::Turn;
use crate::{
    CacheUse, FinishReason, Pooling, Request, RequestId, Retention, SchedulerConfig, SlotId,
    SlotStart, TokenId, Yield,
};

pub(crate) use crate::request_state::allocation::HeldSnapshot;
pub(crate) use crate::request_state::expectation::quantile_of;
pub(crate) use crate::request_state::index::{RequestIndex, RequestSet};
pub(crate) use crate::request_state::table::RequestTable;
pub(crate) use crate::request_state::turn::Leader;

/// The order in which running requests are planned. When pages run out, the request that is last in this order is
/// preempted first. Waiting requests are queued in this order too; see `WaitingRank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// The policy's key, or 0 for every request.
    pub key: i64,
    pub arrival_us: u64,
    /// The number of requests that were submitted before this one.
    pub arrival: u64,
}

impl Rank {
    pub const FIRST: Self = Self {
        key: i64::MIN,
        arrival_us: 0,
        arrival: 0,
    };
}

/// The state of a request. Each part has a file.
#[derive(Debug)]
pub(crate) struct RequestState {
    /// The request as submitted, except that its prompt, and the output drawn on another node, have
    /// been moved to `progress`.
    request: Request,
    rank: Rank,
    max_tokens: u32,
    /// Whether only `max_tokens` can end the output, so that its length is known.
    is_length_known: bool,
    /// End and stop tokens, which must not be drawn before `min_tokens` output tokens.
    masked_until_min_tokens: Arc<[TokenId]>,
    phase: Phase,
    progress: Progress,
    expectation: Expectation,
    /// The source of drafts. `None` without speculation.
    speculator: Option<Speculator>,
    allocation: Allocation,
    path: Path,
    turn: Turn,
    cache_use: CacheUse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Waiting,
    /// Another node or host memory fills the request's pages, and the request has no slot.
    Receiving,
    /// The request's KV has arrived, and the request has no slot yet.
    Arrived,
    Running,
    /// The request has left the running set, but steps in flight still name its slot and pages.
    Leaving(Leaving),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// The terminal output has been emitted. Results of steps in flight are dropped.
    Finished,
    /// The request keeps the results of steps in flight, then waits again.
    Preempted,
    /// The request has read void pages. Results of steps in flight are dropped, then the request waits again.
    Reset,
}

impl RequestState {
    pub fn new(
        mut request: Request,
        rank: Rank,
        max_tokens: u32,
        config: &SchedulerConfig,
    ) -> Self {
        let mut tokens = core::mem::take(&mut request.prompt);
        let num_prompt_tokens = tokens.len() as u32;
        tokens.append(&mut request.output);
        let stopping = &request.stopping;
        let stops = stopping
            .end_token_ids
            .iter()
            .chain(&stopping.stop_token_ids);
        let masked_until_min_tokens = match stopping.min_tokens {
            0 => Arc::default(),
            _ => stops.copied().collect(),
        };
        let num_scored_tokens = match (request.sampling.prompt_logprobs, request.sampling.pooling) {
            (Some(_), None) => 1,
            _ => num_prompt_tokens,
        };
        Self {
            rank,
            max_tokens,
            is_length_known: stopping.is_length_known(),
            masked_until_min_tokens,
            phase: Phase::Waiting,
            progress: Progress::new(tokens, num_prompt_tokens, num_scored_tokens),
            expectation: Expectation::new(rank.arrival),
            // No drafts are made after a token that is drawn through a mask.
            speculator: Speculator::new(config).filter(|_| !request.is_masked),
            allocation: Allocation::new(),
            path: Path::default(),
            turn: Turn::default(),
            cache_use: CacheUse::default(),
            request,
        }
    }

    pub fn id(&self) -> RequestId {
        self.request.id
    }

    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Ends the export of the request's KV. Returns whether the request was exporting.
    pub fn stop_exporting(&mut self) -> bool {
        core::mem::take(&mut self.request.exports_kv)
    }

    pub fn take_retentions(&mut self) -> Vec<Retention> {
        core::mem::take(&mut self.request.retentions)
    }

    pub fn note_retained(&mut self, num_tokens: u32) {
        let longest = &mut self.cache_use.num_retained_tokens;
        *longest = (*longest).max(num_tokens);
    }

    pub fn cache_use(&self) -> CacheUse {
        self.cache_use
    }

    pub fn num_cached_tokens(&self) -> u32 {
        self.cache_use.num_cached_tokens
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Changes the request's rank. No list sorted by rank may contain the request, unless the list is sorted again
    /// afterwards.
    pub fn set_key(&mut self, key: i64) {
        self.rank.key = key;
    }

    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    pub fn is_length_known(&self) -> bool {
        self.is_length_known
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Enters another phase, and returns the previous one.
    pub fn enter(&mut self, phase: Phase) -> Phase {
        core::mem::replace(&mut self.phase, phase)
    }

    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    pub fn speculator_mut(&mut self) -> Option<&mut Speculator> {
        self.speculator.as_mut()
    }

    /// Stops drafts for the request.
    pub fn stop_speculating(&mut self) {
        self.speculator = None;
    }

    /// The number of the request's tokens that may come from the prefix cache or from a leader. The last token is
    /// always computed, for its logits or its hidden state. Tokens are also computed if the log-probability of a token
    /// after them is wanted. All poolings except `LastToken` compute every token.
    pub fn max_cached_tokens(&self) -> usize {
        let last = self.tokens().len() - 1;
        if !self.request.takes_hits() {
            return 0;
        }
        match self.num_scored_tokens() < self.num_prompt_tokens() {
            true => last.min(self.num_scored_tokens() as usize - 1),
            false => last,
        }
    }

    /// The result of a span with the tokens `start..end`. A step in flight may still draw the last of these tokens.
    pub fn yields(&self, start: u32, end: u32) -> Yield {
        if let Some(pooling) = self.request.sampling.pooling {
            return match pooling {
                _ if end == self.num_prompt_tokens() => Yield::HiddenState(pooling),
                Pooling::LastToken | Pooling::FirstToken | Pooling::Max => Yield::Nothing,
                Pooling::Mean => Yield::Sum,
            };
        }
        let draws = end == self.num_total_tokens() && self.max_tokens > 0;
        let positions =
            (start + 1).max(self.num_scored_tokens())..(end + 1).min(self.num_prompt_tokens());
        match (positions.is_empty(), draws) {
            (true, false) => Yield::Nothing,
            (true, true) => Yield::Draw,
            (false, _) => Yield::Logprobs {
                next: (positions.end == end + 1).then(|| self.tokens()[end as usize]),
                positions,
                draws,
            },
        }
    }

    /// Whether the request decodes: its newest token is still to be computed, and `max_tokens` allows another one.
    pub fn wants_decode(&self) -> bool {
        self.is_running()
            && !self.is_prefilling()
            && self.drafts().is_empty()
            && self.num_scheduled_tokens() < self.num_total_tokens()
            && self.num_drawn_tokens() < self.max_tokens
    }

    /// Describes the request to an executor, for drawing its tokens.
    pub fn slot_start(&self, slot: SlotId, num_cached_tokens: usize) -> SlotStart {
        SlotStart {
            slot,
            request: self.request.id,
            sampling: self.request.sampling.clone(),
            num_prompt_tokens: self.num_prompt_tokens(),
            cached_tokens: self.tokens()[..num_cached_tokens].to_vec(),
            min_tokens: self.request.stopping.min_tokens,
            masked_until_min_tokens: self.masked_until_min_tokens.clone(),
            adapter: self.request.namespace.lora.clone(),
            snapshot: None,
        }
    }

    /// The reason for which the newest token ends the request, if any.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        let newest = *self.tokens().last()?;
        let stopping = &self.request.stopping;
        stopping.finish_reason(newest, self.num_output_tokens(), self.max_tokens)
    }
}
