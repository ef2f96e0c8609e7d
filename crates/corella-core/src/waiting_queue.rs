//! Requests without a slot, in the order of their turn.

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use core::cmp::Reverse;

use crate::request_state::{Rank, RequestIndex};

/// Who starts before whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    /// Preempted requests go first where this tells them apart.
    pub is_new: bool,
    pub rank: Rank,
}

/// Requests that may start, and followers, which may not before their leader has computed what
/// they need: those are out of the others' way.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    by_turn: BTreeMap<Turn, RequestIndex>,
    by_ticket: BTreeMap<u64, RequestIndex>,
    /// By leader, then by the page that it has to publish.
    followers: BTreeSet<(RequestIndex, u32, RequestIndex)>,
    next_ticket: u64,
    rounds: PassingRounds,
}

/// The steps in which somebody started, by the latest ticket among those who did: in all of them
/// that are later than a waiting request's ticket, that request was passed over. Only as many are
/// kept, the latest, as make a request aged.
#[derive(Debug, Default)]
struct PassingRounds(BinaryHeap<Reverse<u64>>);

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.by_turn.len() + self.followers.len()
    }

    /// Nobody could start, whatever there were room for.
    pub fn has_none_to_start(&self) -> bool {
        self.by_turn.is_empty()
    }

    pub fn take_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    pub fn insert(&mut self, turn: Turn, ticket: u64, index: RequestIndex) {
        self.by_turn.insert(turn, index);
        self.by_ticket.insert(ticket, index);
    }

    pub fn remove(&mut self, turn: Turn, ticket: u64) {
        self.by_turn.remove(&turn);
        self.by_ticket.remove(&ticket);
    }

    pub fn first(&self) -> Option<RequestIndex> {
        self.first_but(&[])
    }

    /// The next to start that is none of `barred`.
    pub fn first_but(&self, barred: &[RequestIndex]) -> Option<RequestIndex> {
        let mut indices = self.by_turn.values().copied();
        indices.find(|index| !barred.contains(index))
    }

    pub fn first_preempted(&self) -> Option<RequestIndex> {
        let (turn, &index) = self.by_turn.first_key_value()?;
        (!turn.is_new).then_some(index)
    }

    pub fn first_new(&self) -> Option<RequestIndex> {
        self.new_ones().next()
    }

    /// Those that have not run yet, where turns tell them from the preempted.
    pub fn new_ones(&self) -> impl Iterator<Item = RequestIndex> {
        let first = Turn {
            is_new: true,
            rank: Rank::FIRST,
        };
        self.by_turn.range(first..).map(|(_, &index)| index)
    }

    /// Who has waited longest.
    pub fn oldest(&self) -> Option<(u64, RequestIndex)> {
        let (&ticket, &index) = self.by_ticket.first_key_value()?;
        Some((ticket, index))
    }

    /// Keeps a request, which is not in the queue, until its leader has published `num_pages`.
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

    /// Somebody with this ticket has started, and nobody with a later one in the same step.
    pub fn note_started(&mut self, ticket: u64, num_rounds: u32) {
        let rounds = &mut self.rounds.0;
        rounds.push(Reverse(ticket));
        if rounds.len() > num_rounds as usize {
            rounds.pop();
        }
    }

    /// In how many of the last `num_rounds` steps that count a request was passed over.
    pub fn num_passed_over(&self, ticket: u64) -> u32 {
        let later = self
            .rounds
            .0
            .iter()
            .filter(|Reverse(latest)| *latest > ticket);
        later.count() as u32
    }

    /// Whether a request was passed over in as many steps as are remembered, `num_rounds`.
    pub fn is_aged(&self, ticket: u64, num_rounds: u32) -> bool {
        let rounds = &self.rounds.0;
        let first = rounds.peek().map(|Reverse(latest)| *latest);
        rounds.len() >= num_rounds as usize && first.is_some_and(|latest| latest > ticket)
    }
}
