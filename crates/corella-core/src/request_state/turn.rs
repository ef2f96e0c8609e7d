//! The waiting time of a request, and the reason for its wait.

use crate::cache::kv_cache::{FoundPrefix, KvCache};
use crate::cache::prefix_tree::KnownPath;
use crate::request_state::{RequestIndex, RequestState};
use crate::{FetchId, FetchedTokens, StepId};

#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The request's first admission, once it has happened.
    admission: Option<Admission>,
    /// The time of the next check of the latency objectives, while the request waits for its first admission.
    late_us: Option<u64>,
    num_preemptions: u32,
    /// A number that grows with the time at which the request began to wait. A request that waits again takes a new
    /// ticket, unless it has aged.
    ticket: u64,
    /// The number of rounds in which packing started later requests before this one.
    num_passed_over: u32,
    /// The request was passed over or preempted so often that it is protected: policies that overtake start it before
    /// new requests, and more urgent requests must not preempt it.
    is_aged: bool,
    /// The step by which the request should start, while it is aged and waits.
    due_step: Option<StepId>,
    /// The leader that the request follows, if any, and the number of blocks that the leader will publish before the
    /// request may start.
    held_by: Option<(Leader, u32)>,
    /// The number of blocks for which the request last followed another request since it began to wait. The next field
    /// is the same for steps.
    num_awaited_of_requests: u32,
    num_awaited_of_steps: u32,
    /// The last result of the look-up in the prefix tree, while the request waits.
    known_path: KnownPath,
}

/// The source of the blocks that a follower waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Leader {
    /// Another request, which computes the blocks.
    Request(RequestIndex),
    Fetch(FetchId),
    /// A step that takes the snapshot from which the follower can continue.
    Step(StepId),
}

#[derive(Clone, Copy, Debug)]
struct Admission {
    queue_us: u64,
}

impl Turn {
    pub fn forget_path(&mut self) {
        self.known_path = KnownPath::default();
    }
}

impl RequestState {
    reads! {
        turn:
        late_us: Option<u64>,
        num_preemptions: u32,
        ticket: u64,
        num_passed_over: u32,
        is_aged: bool,
    }

    pub fn is_new(&self) -> bool {
        self.turn.admission.is_none()
    }

    /// Records an admission at `now_us`, with `num_cached_tokens` prompt tokens cached, `fetched_tokens` of them
    /// by a fetch for the request. Returns whether it is the request's first one.
    pub fn admit(
        &mut self,
        num_cached_tokens: u32,
        fetched_tokens: FetchedTokens,
        now_us: u64,
    ) -> bool {
        let is_new = self.is_new();
        if is_new {
            self.cache_use.num_cached_tokens = num_cached_tokens;
            self.cache_use.fetched_tokens = fetched_tokens;
            self.turn.admission = Some(Admission {
                queue_us: now_us.saturating_sub(self.request.arrival_us),
            });
        }
        is_new
    }

    /// The time that the request waited, or has waited so far, for its first admission.
    pub fn queue_us(&self, now_us: u64) -> u64 {
        let waited_us = now_us.saturating_sub(self.request.arrival_us);
        self.turn
            .admission
            .map_or(waited_us, |admission| admission.queue_us)
    }

    pub fn set_late_us(&mut self, late_us: Option<u64>) {
        self.turn.late_us = late_us;
    }

    /// Counts a preemption, and returns the number of preemptions.
    pub fn note_preempted(&mut self) -> u32 {
        self.turn.num_preemptions += 1;
        self.turn.num_preemptions
    }

    pub fn set_ticket(&mut self, ticket: u64) {
        self.turn.ticket = ticket;
    }

    /// Counts a round in which later requests started before this one, and returns the number of such rounds.
    pub fn note_passed_over(&mut self) -> u32 {
        self.turn.num_passed_over += 1;
        self.turn.num_passed_over
    }

    pub fn set_aged(&mut self, is_aged: bool) {
        self.turn.is_aged = is_aged;
    }

    /// The step by which the request should start. The first call computes the step with `due`.
    pub fn due_step(&mut self, due: impl FnOnce() -> StepId) -> StepId {
        *self.turn.due_step.get_or_insert_with(due)
    }

    pub fn leader(&self) -> Option<Leader> {
        self.turn.held_by.map(|(leader, _)| leader)
    }

    /// Makes the request follow a leader until the leader has published `num_blocks` blocks.
    pub fn follow(&mut self, leader: Leader, num_blocks: u32) {
        self.turn.held_by = Some((leader, num_blocks));
        match leader {
            Leader::Request(_) => self.turn.num_awaited_of_requests = num_blocks,
            Leader::Step(_) => self.turn.num_awaited_of_steps = num_blocks,
            Leader::Fetch(_) => {}
        }
    }

    /// The number of blocks for which the request last followed a leader of this kind since it began to wait.
    pub fn num_awaited_blocks(&self, leader: Leader) -> u32 {
        match leader {
            Leader::Request(_) => self.turn.num_awaited_of_requests,
            Leader::Step(_) => self.turn.num_awaited_of_steps,
            Leader::Fetch(_) => 0,
        }
    }

    /// Returns the leader that the request followed, and the number of blocks that it waited for.
    pub fn stop_following(&mut self) -> Option<(Leader, u32)> {
        self.turn.held_by.take()
    }

    /// Ends the request's wait, because its turn has come.
    pub fn end_turn(&mut self) {
        self.turn.due_step = None;
        self.turn.num_awaited_of_requests = 0;
        self.turn.num_awaited_of_steps = 0;
        self.turn.forget_path();
    }

    /// The number of blocks that the last look-up found.
    pub fn num_found_blocks(&self) -> usize {
        self.turn.known_path.num_blocks()
    }

    /// Finds the request's tokens in the prefix tree. A request that waits long is looked up often, so it remembers the
    /// result.
    pub fn find_prefix(&mut self, kv: &KvCache, step: StepId) -> FoundPrefix {
        let num_tokens = self.max_cached_tokens();
        let tokens = &self.progress.tokens()[..num_tokens];
        let known = &mut self.turn.known_path;
        kv.find_prefix(&self.request.namespace, tokens, step, known)
    }
}
