//! Requests that wait for a slot, sorted by their rank in the queue.

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use core::cmp::Reverse;

use crate::pace::Pace;
use crate::queue::deadline::Deadlines;
use crate::request_state::{Leader, Phase, Rank, RequestIndex, RequestState, RequestTable};
use crate::scheduler_config::policy::Policy;
use crate::{AdmissionError, Request, SchedulerConfig};

/// The order of the queue. Policies that look ahead sort its first requests by their present keys, and packing picks
/// the ones that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaitingRank {
    /// False for preempted requests, so that they come before new ones. A policy that preempts sorts new and preempted
    /// requests together: then `is_new` is false for all.
    pub is_new: bool,
    pub rank: Rank,
}

/// Requests that may start, and followers, which may not start before their leader has published their prefix.
/// Followers are kept apart, so that requests after them can start meanwhile.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    /// Whether requests that were preempted are sorted before new ones.
    resumes_first: bool,
    /// Whether requests are sorted by their keys. Otherwise they are sorted by arrival.
    has_keys: bool,
    /// A request that was passed over in this number of steps, or preempted this number of times, has aged.
    max_passed_over: u32,
    by_rank: BTreeMap<WaitingRank, RequestIndex>,
    by_ticket: BTreeMap<u64, RequestIndex>,
    /// Sorted by leader, then by the number of blocks that the leader must publish before the follower can start.
    followers: BTreeSet<(Leader, u32, RequestIndex)>,
    next_ticket: u64,
    rounds: PassingRounds,
    /// The number of requests that wait for their first admission, and the sum of their prompt tokens.
    num_new: usize,
    num_new_tokens: u64,
    /// The number of admission rounds in which at least one request was waiting.
    num_admission_rounds: u64,
    /// Whether a request waits for pages.
    lacks_pages: bool,
    deadlines: Deadlines,
}

/// The latest ticket among the requests that started in each step. A waiting request was passed over in every step
/// whose entry is later than its own ticket. Only the `max_passed_over` largest entries are kept. Entries are added
/// only under policies that overtake: `fcfs` starts requests in their order, and packing has a count of its own.
#[derive(Debug, Default)]
struct PassingRounds(BinaryHeap<Reverse<u64>>);

impl WaitingQueue {
    pub fn new(config: &SchedulerConfig, policy: &Policy) -> Self {
        Self {
            resumes_first: !policy.preempts,
            has_keys: policy.lookahead.is_none(),
            max_passed_over: config.max_passed_over,
            deadlines: Deadlines::new(config.enable_slo_admission),
            ..Self::default()
        }
    }

    pub fn len(&self) -> usize {
        self.by_rank.len() + self.followers.len()
    }

    /// Whether all waiting requests are followers, so that none could start even with enough room.
    pub fn has_none_to_start(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// The prompt tokens of all requests that wait for their first admission.
    pub fn num_new_tokens(&self) -> u64 {
        self.num_new_tokens
    }

    /// The limit of requests that wait for their first admission. Each free slot adds one to the limit, unless requests
    /// wait for pages.
    pub fn limit(&self, config: &SchedulerConfig, num_free_slots: usize) -> u32 {
        let limit = config.max_queued_requests;
        match self.lacks_pages {
            true => limit,
            false => limit.saturating_add(num_free_slots as u32),
        }
    }

    /// Whether the queue has room for the requests of one API call. If no other request waits, a prompt of any length
    /// has room.
    pub fn check_room(
        &self,
        requests: &[Request],
        config: &SchedulerConfig,
        num_free_slots: usize,
    ) -> Result<(), AdmissionError> {
        let limit = self.limit(config, num_free_slots);
        if self.num_new + requests.len() > limit as usize {
            let num_waiting = self.num_new;
            return Err(AdmissionError::QueueFull { num_waiting, limit });
        }
        let num_tokens = requests.iter().map(|request| request.prompt.len() as u64);
        let num_tokens = self.num_new_tokens.saturating_add(num_tokens.sum());
        if self.num_new_tokens > 0 && num_tokens > config.max_queued_tokens {
            return Err(AdmissionError::QueuedTokensFull {
                num_queued_tokens: self.num_new_tokens,
                limit: config.max_queued_tokens,
            });
        }
        Ok(())
    }

    pub fn begin_round(&mut self) {
        self.num_admission_rounds += 1;
    }

    /// Ends the admissions of a step. If the step still has a slot and tokens for a request that waits, the request
    /// lacks pages.
    pub fn end_round(&mut self, has_slot_and_tokens: bool) {
        let waits = !self.by_rank.is_empty();
        self.lacks_pages = waits && (has_slot_and_tokens || self.lacks_pages);
    }

    pub fn num_admission_rounds(&self) -> u64 {
        self.num_admission_rounds
    }

    /// The rank of a waiting request in the queue.
    fn rank(&self, state: &RequestState) -> WaitingRank {
        let mut rank = state.rank();
        if !self.has_keys {
            rank.key = 0;
        }
        WaitingRank {
            is_new: state.is_new() && self.resumes_first,
            rank,
        }
    }

    /// Adds a request that may start. If the request is new, watches whether it becomes too late.
    pub fn add(&mut self, index: RequestIndex, state: &mut RequestState, pace: &Pace) {
        // A request that was preempted `max_passed_over` times has aged, and keeps its ticket from now on.
        if state.num_preemptions() >= self.max_passed_over {
            state.set_aged(true);
        }
        if state.ticket() == 0 || !state.is_aged() {
            self.next_ticket += 1;
            state.set_ticket(self.next_ticket);
        }
        if state.is_new() {
            self.num_new += 1;
            self.num_new_tokens += u64::from(state.num_prompt_tokens());
            self.deadlines.watch(index, state, pace);
        }
        self.list(index, state);
    }

    /// Removes a request from the queue or the followers.
    pub fn take_out(&mut self, index: RequestIndex, state: &mut RequestState) {
        if !self.stop_following(index, state) {
            self.unlist(state);
        }
        if state.is_new() {
            self.num_new -= 1;
            self.num_new_tokens -= u64::from(state.num_prompt_tokens());
            self.deadlines.forget(index, state);
        }
    }

    fn list(&mut self, index: RequestIndex, state: &RequestState) {
        self.by_rank.insert(self.rank(state), index);
        self.by_ticket.insert(state.ticket(), index);
    }

    fn unlist(&mut self, state: &RequestState) {
        self.by_rank.remove(&self.rank(state));
        self.by_ticket.remove(&state.ticket());
        self.lacks_pages &= !self.by_rank.is_empty();
    }

    /// Returns a new request that may have become too late.
    pub fn first_late(&self, now_us: u64, expected_tpot_us: u64) -> Option<RequestIndex> {
        self.deadlines.first_late(now_us, expected_tpot_us)
    }

    /// Keeps watching a new request that would not be late now.
    pub fn watch_on(
        &mut self,
        index: RequestIndex,
        state: &mut RequestState,
        num_cached: u64,
        pace: &Pace,
    ) {
        self.deadlines.watch_on(index, state, num_cached, pace);
    }

    /// Makes a request follow a leader until the leader has published `num_blocks` blocks.
    pub fn follow(
        &mut self,
        index: RequestIndex,
        state: &mut RequestState,
        leader: Leader,
        num_blocks: u32,
    ) {
        self.unlist(state);
        self.followers.insert((leader, num_blocks, index));
        state.follow(leader, num_blocks);
    }

    /// Requeues the followers that need at most the first `num_blocks` blocks of the leader.
    pub fn let_go_of_followers(
        &mut self,
        leader: Leader,
        num_blocks: u32,
        requests: &mut RequestTable,
    ) {
        while let Some(index) = self.follower_up_to(leader, num_blocks) {
            let state = &mut requests[index];
            self.stop_following(index, state);
            self.list(index, state);
        }
    }

    pub fn has_followers(&self) -> bool {
        !self.followers.is_empty()
    }

    /// Returns false if the request was not a follower.
    fn stop_following(&mut self, index: RequestIndex, state: &mut RequestState) -> bool {
        let held_by = state.stop_following();
        if let Some((leader, num_blocks)) = held_by {
            self.followers.remove(&(leader, num_blocks, index));
        }
        held_by.is_some()
    }

    pub fn first(&self) -> Option<RequestIndex> {
        self.first_but(&[])
    }

    /// Returns all waiting requests: those that may start, in the order of the queue, and then the followers.
    pub fn iter(&self) -> impl Iterator<Item = RequestIndex> {
        let followers = self.followers.iter().map(|&(_, _, index)| index);
        self.by_rank.values().copied().chain(followers)
    }

    /// The first request in the queue that is not in `barred`.
    pub fn first_but(&self, barred: &[RequestIndex]) -> Option<RequestIndex> {
        self.in_order().find(|index| !barred.contains(index))
    }

    /// The first preempted request, if preempted requests start before new ones.
    pub fn first_preempted(&self) -> Option<RequestIndex> {
        let (rank, &index) = self.by_rank.first_key_value()?;
        (self.resumes_first && !rank.is_new).then_some(index)
    }

    /// Requests that may start, in the order of the queue. Preempted ones are left out if they start before new ones.
    pub fn in_order(&self) -> impl Iterator<Item = RequestIndex> {
        let first = WaitingRank {
            is_new: self.resumes_first,
            rank: Rank::FIRST,
        };
        self.by_rank.range(first..).map(|(_, &index)| index)
    }

    /// The request that has waited longest, if it is owed its turn.
    pub fn oldest_aged(&self, requests: &RequestTable) -> Option<RequestIndex> {
        let (&ticket, &index) = self.by_ticket.first_key_value()?;
        (self.is_aged(ticket) || requests[index].is_aged()).then_some(index)
    }

    /// A follower of `leader` that needs at most the leader's first `num_blocks` blocks.
    fn follower_up_to(&self, leader: Leader, num_blocks: u32) -> Option<RequestIndex> {
        let last = (leader, num_blocks, RequestIndex::LAST);
        let mut found = self
            .followers
            .range((leader, 0, RequestIndex::FIRST)..=last);
        found.next().map(|&(.., follower)| follower)
    }

    /// Records a step in which requests started. `ticket` is the latest of their tickets.
    pub fn note_started(&mut self, ticket: u64) {
        let rounds = &mut self.rounds.0;
        rounds.push(Reverse(ticket));
        if rounds.len() > self.max_passed_over as usize {
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

    /// Whether a request with this ticket was passed over in `max_passed_over` recorded steps.
    fn is_aged(&self, ticket: u64) -> bool {
        let rounds = &self.rounds.0;
        let first = rounds.peek().map(|Reverse(latest)| *latest);
        rounds.len() >= self.max_passed_over as usize && first.is_some_and(|latest| latest > ticket)
    }

    /// # Panics
    /// Panics when the counts of new requests differ from the requests.
    pub fn check_invariants(&self, requests: &RequestTable) {
        let is_queued = |state: &&RequestState| state.phase() == Phase::Waiting && state.is_new();
        let queued = requests.iter().filter(is_queued);
        let (num_queued, num_tokens) = queued.fold((0, 0), |(num_queued, num_tokens), state| {
            let num_prompt_tokens = u64::from(state.num_prompt_tokens());
            (num_queued + 1, num_tokens + num_prompt_tokens)
        });
        assert_eq!(
            (num_queued, num_tokens),
            (self.num_new, self.num_new_tokens),
            "the numbers of queued requests and of their tokens are wrong"
        );
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::{LatencyObjectives, RequestId};

    fn queue(max_passed_over: u32) -> WaitingQueue {
        let mut config = SchedulerConfig::new(64, 4, 256);
        config.max_passed_over = max_passed_over;
        config.enable_slo_admission = true;
        WaitingQueue::new(&config, &config.scheduling_policy.policy())
    }

    /// Adds requests of three tokens with these arrivals.
    fn add(
        queue: &mut WaitingQueue,
        requests: &mut RequestTable,
        arrivals: &[u64],
    ) -> Vec<RequestIndex> {
        let config = SchedulerConfig::new(64, 4, 256);
        let add = |&arrival: &u64| {
            let mut request = Request::greedy(RequestId(arrival), vec![1, 2, 3], 8);
            request.objectives = LatencyObjectives {
                ttft_us: Some(100),
                tpot_us: None,
            };
            let rank = Rank {
                arrival,
                ..Rank::FIRST
            };
            let index = requests.insert(RequestState::new(request, rank, 8, &config));
            queue.add(index, &mut requests[index], &Pace::default());
            index
        };
        arrivals.iter().map(add).collect()
    }

    #[test]
    fn followers_return_when_their_blocks_are_there() {
        let (mut queue, mut requests) = (queue(16), RequestTable::default());
        let added = add(&mut queue, &mut requests, &[3, 1, 2]);
        assert_eq!(queue.first(), Some(added[1]));
        let leader = Leader::Request(added[0]);
        queue.follow(added[1], &mut requests[added[1]], leader, 2);
        queue.follow(added[2], &mut requests[added[2]], leader, 5);
        assert_eq!(queue.first(), Some(added[0]));
        assert_eq!((queue.len(), queue.num_new_tokens()), (3, 9));
        queue.let_go_of_followers(leader, 1, &mut requests);
        assert_eq!(queue.first(), Some(added[0]));
        queue.let_go_of_followers(leader, 4, &mut requests);
        assert_eq!(queue.first(), Some(added[1]));
        queue.take_out(added[2], &mut requests[added[2]]);
        assert_eq!((queue.len(), queue.num_new_tokens()), (2, 6));
    }

    #[test]
    fn a_request_passed_over_in_enough_steps_is_owed_its_turn() {
        let (mut queue, mut requests) = (queue(2), RequestTable::default());
        let added = add(&mut queue, &mut requests, &[1]);
        for ticket in [7, 8] {
            assert_eq!(queue.oldest_aged(&requests), None);
            queue.note_started(ticket);
        }
        assert_eq!(queue.oldest_aged(&requests), Some(added[0]));
    }

    /// A request is late only after its deadline, and never after it has left the queue.
    #[test]
    fn a_request_that_leaves_is_watched_no_longer() {
        let (mut queue, mut requests) = (queue(2), RequestTable::default());
        let added = add(&mut queue, &mut requests, &[1]);
        assert_eq!(queue.first_late(100, 0), None);
        assert_eq!(queue.first_late(101, 0), Some(added[0]));
        queue.take_out(added[0], &mut requests[added[0]]);
        assert_eq!(queue.first_late(101, 0), None);
    }
}
