//! Whose turn it is among those that wait, when it is not simply the first to arrive.

use core::cmp::Reverse;

use alloc::vec::Vec;

use crate::admission::{Held, MAX_HELD_BY_LEADERS};
use crate::request_state::{RequestIndex, RequestState};
use crate::step_plan::StepPlan;
use crate::waiting_queue::Queue;
use crate::{Scheduler, SchedulingPolicy};

/// Tokens that longest-prefix-first compares with the tree in one step. Requests beyond it are
/// ordered by what earlier steps found.
const MAX_COMPARED_TOKENS: usize = 1 << 16;

impl Scheduler {
    /// Order within a queue: the least first.
    pub(crate) fn turn(&self, state: &RequestState) -> (i32, u64) {
        match self.config.scheduling_policy {
            SchedulingPolicy::Priority => state.rank(),
            SchedulingPolicy::Fcfs | SchedulingPolicy::LongestPrefix { .. } => (0, state.arrival),
        }
    }

    /// Puts a request where its turn is.
    pub(crate) fn wait(&mut self, index: RequestIndex) {
        let state = &self.requests[index];
        let is_fcfs = self.config.scheduling_policy == SchedulingPolicy::Fcfs;
        let (queue, turn) = if !is_fcfs && self.is_aged(state) {
            (Queue::Aged, (0, state.arrival))
        } else if state.num_cached_tokens.is_some() {
            (Queue::Preempted, self.turn(state))
        } else {
            (Queue::New, self.turn(state))
        };
        let turn_of = |&other: &RequestIndex| {
            let other = &self.requests[other];
            match queue {
                Queue::Aged => (0, other.arrival),
                Queue::Preempted | Queue::New => self.turn(other),
            }
        };
        let at = self
            .waiting
            .queue(queue)
            .partition_point(|other| turn_of(other) < turn);
        self.waiting.queue_mut(queue).insert(at, index);
    }

    /// Others went before it so often that none may any more.
    fn is_aged(&self, state: &RequestState) -> bool {
        state.num_passed_over >= self.config.max_passed_over
    }

    pub(crate) fn pass_over(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        state.num_passed_over += 1;
        let max = &mut self.counters.max_passed_over;
        *max = state.num_passed_over.max(*max);
    }

    /// Counts a round for all that came before one that it started, and lets those age that
    /// have been passed over often enough.
    pub(crate) fn count_passed_over(&mut self, plan: &StepPlan) {
        let requests = &self.requests;
        let waiting = &self.waiting;
        let earlier = |&index: &RequestIndex| requests[index].arrival < plan.latest_arrival;
        let overtaken: Vec<_> = match self.config.scheduling_policy {
            SchedulingPolicy::Priority => {
                let all = waiting.preempted.iter().chain(&waiting.new).copied();
                all.filter(earlier).collect()
            }
            SchedulingPolicy::Fcfs | SchedulingPolicy::LongestPrefix { .. } => {
                waiting.new.iter().copied().take_while(earlier).collect()
            }
        };
        for index in overtaken {
            self.pass_over(index);
            if self.is_aged(&self.requests[index]) {
                self.waiting.remove(index);
                self.wait(index);
            }
        }
    }

    /// The queue whose `num_held[queue]`-th request is the most urgent.
    fn most_urgent(&self, num_held: [usize; 2]) -> Option<(usize, RequestIndex)> {
        let queues = [&self.waiting.preempted, &self.waiting.new];
        let heads = (0..2).filter_map(|queue| Some((queue, *queues[queue].get(num_held[queue])?)));
        heads.min_by_key(|&(_, index)| self.requests[index].rank())
    }

    /// Starts the most urgent requests until one does not fit.
    pub(crate) fn admit_most_urgent(&mut self, plan: &mut StepPlan) {
        let mut num_held = [0; 2];
        while let Some((queue, index)) = self.most_urgent(num_held) {
            match self.try_start(index, plan) {
                Ok(()) => {}
                Err(Held::ByLeader) if num_held[0] + num_held[1] < MAX_HELD_BY_LEADERS => {
                    num_held[queue] += 1;
                }
                Err(_) => return,
            }
        }
    }

    /// Preempts running requests that are less urgent than the first that waits, if that gives
    /// it the slot or the pages that it lacks. One that has aged, or was preempted as often as
    /// it may be, is left alone.
    pub(crate) fn preempt_less_urgent(&mut self, plan: &mut StepPlan) {
        if self.config.scheduling_policy != SchedulingPolicy::Priority
            || self.num_leaving > 0
            || !self.waiting.aged.is_empty()
        {
            return;
        }
        let Some((_, head)) = self.most_urgent([0; 2]) else {
            return;
        };
        let priority = self.requests[head].request.priority;
        let is_less_urgent = |state: &RequestState| state.request.priority > priority;
        let last = self.running.last();
        if !last.is_some_and(|&last| is_less_urgent(&self.requests[last])) {
            return;
        }
        self.survey_running(plan);
        let Ok(candidate) = self.candidate(head, plan) else {
            return;
        };
        let mut num_slots = self.free_slots.len();
        let mut num_available = self.kv.num_available();
        // This step's decodes come first, and may each begin a page.
        let page_size = self.config.page_size;
        let begins_page = |state: &RequestState| state.num_total_tokens().is_multiple_of(page_size);
        let num_asked =
            |state: &RequestState| self.num_future_pages(state) + usize::from(begins_page(state));
        let running = self.running.iter();
        let mut num_reserved: usize = running.map(|&i| num_asked(&self.requests[i])).sum();
        let mut victims = Vec::new();
        for &index in self.running.iter().rev() {
            if num_slots > 0 && candidate.num_needed_pages + num_reserved <= num_available {
                break;
            }
            let state = &self.requests[index];
            if !is_less_urgent(state) {
                // Preempting the others would not make room.
                return;
            }
            if self.is_aged(state) || state.num_preemptions >= self.config.max_preemptions {
                continue;
            }
            // Pages that others hold too, or that the candidate will lock, are not won.
            let matched = &candidate.matched.pages;
            let num_shared = matched
                .iter()
                .zip(&state.table)
                .take_while(|(left, right)| left == right)
                .count();
            let own = state.table[num_shared..].iter();
            num_available += own.filter(|&&page| self.kv.num_locks(page) == 1).count();
            num_reserved -= num_asked(state);
            num_slots += 1;
            victims.push(index);
        }
        let makes_room =
            num_slots > 0 && candidate.num_needed_pages + num_reserved <= num_available;
        for index in victims.into_iter().filter(|_| makes_room) {
            self.pass_over(index);
            self.preempt(index);
        }
    }

    /// Starts those of the first `lookahead` requests that have the most in the prefix tree,
    /// until one does not fit.
    pub(crate) fn admit_longest_prefix(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if !self.has_room_to_start(plan) {
            return;
        }
        let window = self.waiting.new.iter().take(lookahead as usize).copied();
        let mut by_prefix: Vec<_> = window.map(|index| (Reverse(0), index)).collect();
        let page_size = self.config.page_size as usize;
        let mut num_compared = 0;
        for (matched_rows, index) in &mut by_prefix {
            let num_known = self.requests[*index].known_path.num_pages() * page_size;
            if num_compared >= MAX_COMPARED_TOKENS {
                *matched_rows = Reverse(num_known);
                continue;
            }
            let matched = self.match_waiting(*index, plan.batch.step);
            let num_whole = matched.pages.len() * page_size;
            num_compared += page_size + num_whole.saturating_sub(num_known);
            let num_copied = matched.donor.map_or(0, |(_, num_rows)| num_rows as usize);
            *matched_rows = Reverse(num_whole + num_copied);
        }
        by_prefix.sort_by_key(|&(matched_rows, _)| matched_rows);
        for (_, index) in by_prefix {
            if self.try_start(index, plan) == Err(Held::NoRoom) {
                return;
            }
        }
    }
}
