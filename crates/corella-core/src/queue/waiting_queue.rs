//! Requests that wait for a slot, sorted by their rank in the queue.

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use core::cmp::Reverse;

use crate::Scheduler;
use crate::request_state::{Rank, RequestIndex, RequestState};

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
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    by_rank: BTreeMap<WaitingRank, RequestIndex>,
    by_ticket: BTreeMap<u64, RequestIndex>,
    /// Sorted by leader, then by the number of pages that the leader must publish before the
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

    fn count_new(&mut self, num_prompt_tokens: u32) {
        self.num_new += 1;
        self.num_new_tokens += u64::from(num_prompt_tokens);
    }

    fn uncount_new(&mut self, num_prompt_tokens: u32) {
        self.num_new -= 1;
        self.num_new_tokens -= u64::from(num_prompt_tokens);
    }

    pub fn begin_round(&mut self) {
        self.num_admission_rounds += 1;
    }

    pub fn num_admission_rounds(&self) -> u64 {
        self.num_admission_rounds
    }

    pub fn take_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    pub fn insert(&mut self, rank: WaitingRank, ticket: u64, index: RequestIndex) {
        self.by_rank.insert(rank, index);
        self.by_ticket.insert(ticket, index);
    }

    pub fn remove(&mut self, rank: WaitingRank, ticket: u64) {
        self.by_rank.remove(&rank);
        self.by_ticket.remove(&ticket);
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

    /// Adds a follower, which must not be in the queue, until its leader has published `num_pages`.
    pub fn insert_follower(&mut self, leader: RequestIndex, num_pages: u32, index: RequestIndex) {
        self.followers.insert((leader, num_pages, index));
    }

    pub fn remove_follower(&mut self, leader: RequestIndex, num_pages: u32, index: RequestIndex) {
        self.followers.remove(&(leader, num_pages, index));
    }

    /// A follower of `leader` that needs no more than its first `num_pages` pages.
    pub fn follower_up_to(&self, leader: RequestIndex, num_pages: u32) -> Option<RequestIndex> {
        let last = (leader, num_pages, RequestIndex::LAST);
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
    /// The rank of a waiting request in the queue.
    pub(super) fn waiting_rank(&self, state: &RequestState) -> WaitingRank {
        let resumes_first = self.config.scheduling_policy.resumes_first();
        WaitingRank {
            is_new: state.is_new() && resumes_first,
            rank: state.rank,
        }
    }

    /// Puts a request into the queue.
    pub(crate) fn wait(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        // A request that was preempted `max_passed_over` times has aged, and keeps its ticket from
        // now on.
        state.is_aged |= state.num_preemptions >= self.config.max_passed_over;
        if state.ticket == 0 || !state.is_aged {
            state.ticket = self.waiting.take_ticket();
        }
        if state.is_new() {
            self.waiting.count_new(state.num_prompt_tokens);
            self.watch_deadline(index);
        }
        let state = &self.requests[index];
        self.waiting
            .insert(self.waiting_rank(state), state.ticket, index);
    }

    /// Takes a waiting request out of the queue, or from among the followers.
    pub(crate) fn stop_waiting(&mut self, index: RequestIndex) {
        if !self.stop_following(index) {
            let state = &self.requests[index];
            self.waiting.remove(self.waiting_rank(state), state.ticket);
        }
        let state = &self.requests[index];
        if state.is_new() {
            self.waiting.uncount_new(state.num_prompt_tokens);
            self.forget_deadline(index);
        }
    }
}
