//! Requests that wait for a slot, sorted by their rank in the queue.

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use core::cmp::Reverse;

use crate::request_state::{Rank, RequestIndex, RequestState};
use crate::{Scheduler, SchedulerConfig};

/// The order of the queue. `fcfs` starts requests in this order. So does `priority`, except that it
/// starts aged requests first and skips those that would delay an aged one. `lpm` and packing start
/// preempted requests in this order; among the first few new ones `lpm` starts aged ones, then
/// those with the longest cached prefix, and packing picks those that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaitingRank {
    /// False for requests that were preempted, which are sorted before new ones, and for all
    /// requests under `priority`, which sorts both kinds by rank alone.
    pub is_new: bool,
    pub rank: Rank,
}

/// Requests that may start, and followers, which may not start before their leader has computed
/// what they need. Followers are kept apart, so that requests behind them can start meanwhile.
#[derive(Debug)]
pub(crate) struct WaitingQueue {
    /// Whether requests that were preempted are sorted before new ones.
    resumes_first: bool,
    /// A request that was preempted this often has aged.
    max_passed_over: u32,
    by_rank: BTreeMap<WaitingRank, RequestIndex>,
    by_ticket: BTreeMap<u64, RequestIndex>,
    /// Sorted by leader, then by the number of blocks that the leader must publish before the
    /// follower can start.
    followers: BTreeSet<(RequestIndex, u32, RequestIndex)>,
    next_ticket: u64,
    rounds: PassingRounds,
    /// The number of requests that wait for their first admission, and their prompt tokens.
    num_new: usize,
    num_new_tokens: u64,
    /// The number of admission rounds in which at least one request was waiting.
    num_admission_rounds: u64,
}

/// The latest ticket among the requests that started in each step. A waiting request was passed
/// over in every step whose entry is later than its own ticket. Only the largest entries are kept,
/// as many as make a request age. Entries are added under `priority` and `lpm` only: `fcfs` starts
/// requests in their order, and packing counts for itself.
#[derive(Debug, Default)]
struct PassingRounds(BinaryHeap<Reverse<u64>>);

impl WaitingQueue {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self {
            resumes_first: config.scheduling_policy.resumes_first(),
            max_passed_over: config.max_passed_over,
            by_rank: BTreeMap::new(),
            by_ticket: BTreeMap::new(),
            followers: BTreeSet::new(),
            next_ticket: 0,
            rounds: PassingRounds::default(),
            num_new: 0,
            num_new_tokens: 0,
            num_admission_rounds: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.by_rank.len() + self.followers.len()
    }

    /// Whether no waiting request could start, however much room there was: all of them follow
    /// leaders.
    pub fn has_none_to_start(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// The number of requests that wait for their first admission.
    pub fn num_new(&self) -> usize {
        self.num_new
    }

    /// The prompt tokens of all requests that wait for their first admission.
    pub fn num_new_tokens(&self) -> u64 {
        self.num_new_tokens
    }

    pub fn begin_round(&mut self) {
        self.num_admission_rounds += 1;
    }

    pub fn num_admission_rounds(&self) -> u64 {
        self.num_admission_rounds
    }

    /// The rank of a waiting request in the queue.
    fn rank(&self, state: &RequestState) -> WaitingRank {
        WaitingRank {
            is_new: state.is_new() && self.resumes_first,
            rank: state.rank,
        }
    }

    /// Adds a request, which may start.
    pub fn add(&mut self, index: RequestIndex, state: &mut RequestState) {
        // A request that was preempted `max_passed_over` times has aged, and keeps its ticket from
        // now on.
        state.is_aged |= state.num_preemptions >= self.max_passed_over;
        if state.ticket == 0 || !state.is_aged {
            self.next_ticket += 1;
            state.ticket = self.next_ticket;
        }
        if state.is_new() {
            self.num_new += 1;
            self.num_new_tokens += u64::from(state.num_prompt_tokens);
        }
        self.list(index, state);
    }

    /// Takes a request out, wherever it is.
    pub fn take_out(&mut self, index: RequestIndex, state: &mut RequestState) {
        if !self.stop_following(index, state) {
            self.unlist(state);
        }
        if state.is_new() {
            self.num_new -= 1;
            self.num_new_tokens -= u64::from(state.num_prompt_tokens);
        }
    }

    fn list(&mut self, index: RequestIndex, state: &RequestState) {
        self.by_rank.insert(self.rank(state), index);
        self.by_ticket.insert(state.ticket, index);
    }

    fn unlist(&mut self, state: &RequestState) {
        self.by_rank.remove(&self.rank(state));
        self.by_ticket.remove(&state.ticket);
    }

    /// Lets a request follow a leader until that has published `num_blocks` blocks.
    pub fn follow(
        &mut self,
        index: RequestIndex,
        state: &mut RequestState,
        leader: RequestIndex,
        num_blocks: u32,
    ) {
        self.unlist(state);
        self.followers.insert((leader, num_blocks, index));
        state.held_by = Some((leader, num_blocks));
    }

    /// Puts a follower back among the requests that may start.
    pub fn let_go(&mut self, index: RequestIndex, state: &mut RequestState) {
        self.stop_following(index, state);
        self.list(index, state);
    }

    /// Returns false if the request was not a follower.
    fn stop_following(&mut self, index: RequestIndex, state: &mut RequestState) -> bool {
        let held_by = state.held_by.take();
        if let Some((leader, num_blocks)) = held_by {
            self.followers.remove(&(leader, num_blocks, index));
        }
        held_by.is_some()
    }

    pub fn first(&self) -> Option<RequestIndex> {
        self.first_but(&[])
    }

    /// All of them: those that may start in the order of the queue, then the followers.
    pub fn iter(&self) -> impl Iterator<Item = RequestIndex> {
        let followers = self.followers.iter().map(|&(_, _, index)| index);
        self.by_rank.values().copied().chain(followers)
    }

    /// The first request in the queue that is not in `barred`.
    pub fn first_but(&self, barred: &[RequestIndex]) -> Option<RequestIndex> {
        let mut indices = self.by_rank.values().copied();
        indices.find(|index| !barred.contains(index))
    }

    pub fn first_preempted(&self) -> Option<RequestIndex> {
        let (rank, &index) = self.by_rank.first_key_value()?;
        (!rank.is_new).then_some(index)
    }

    pub fn first_new(&self) -> Option<RequestIndex> {
        self.new_ones().next()
    }

    /// Requests that have never run, in the order of the queue. Under `priority` there are none,
    /// because new and preempted requests are sorted as one.
    pub fn new_ones(&self) -> impl Iterator<Item = RequestIndex> {
        let first = WaitingRank {
            is_new: true,
            rank: Rank::FIRST,
        };
        self.by_rank.range(first..).map(|(_, &index)| index)
    }

    /// The request with the earliest ticket.
    pub fn oldest(&self) -> Option<(u64, RequestIndex)> {
        let (&ticket, &index) = self.by_ticket.first_key_value()?;
        Some((ticket, index))
    }

    /// A follower of `leader` that needs no more than its first `num_blocks` blocks.
    pub fn follower_up_to(&self, leader: RequestIndex, num_blocks: u32) -> Option<RequestIndex> {
        let last = (leader, num_blocks, RequestIndex::LAST);
        let mut found = self
            .followers
            .range((leader, 0, RequestIndex::FIRST)..=last);
        found.next().map(|&(.., follower)| follower)
    }

    /// Records a step in which requests started; `ticket` is the latest of theirs.
    pub fn note_started(&mut self, ticket: u64, num_rounds: u32) {
        let rounds = &mut self.rounds.0;
        rounds.push(Reverse(ticket));
        if rounds.len() > num_rounds as usize {
            rounds.pop();
        }
    }

    /// The number of recorded steps in which a request with this ticket was passed over.
    pub fn num_passed_over(&self, ticket: u64) -> u32 {
        let later = self
            .rounds
            .0
            .iter()
            .filter(|Reverse(latest)| *latest > ticket);
        later.count() as u32
    }

    /// Whether a request with this ticket was passed over in all `num_rounds` recorded steps.
    pub fn is_aged(&self, ticket: u64, num_rounds: u32) -> bool {
        let rounds = &self.rounds.0;
        let first = rounds.peek().map(|Reverse(latest)| *latest);
        rounds.len() >= num_rounds as usize && first.is_some_and(|latest| latest > ticket)
    }
}

impl Scheduler {
    /// Puts a request into the queue.
    pub(crate) fn wait(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let is_new = state.is_new();
        self.waiting.add(index, state);
        if is_new {
            self.watch_deadline(index);
        }
    }

    /// Takes a waiting request out of the queue, or from among the followers.
    pub(crate) fn stop_waiting(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let is_new = state.is_new();
        self.waiting.take_out(index, state);
        if is_new {
            self.forget_deadline(index);
        }
    }
}
