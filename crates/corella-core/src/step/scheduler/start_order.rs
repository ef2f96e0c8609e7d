//! Starts waiting requests in the order of the policy's keys.

use alloc::vec::Vec;

use crate::request_state::{RequestIndex, RequestState};
use crate::scheduler_config::policy::RequestFacts;
use crate::step::scheduler::admission::Held;
use crate::step::step_plan::StepPlan;
use crate::{PrefillAdmissionPolicy, Scheduler};

/// The most tokens that one step compares with the prefix tree. Requests beyond this limit keep the prefix lengths that
/// earlier steps found.
const MAX_COMPARED_TOKENS: usize = 1 << 16;

/// The limit of requests that one step skips because they would delay the aged request.
const MAX_BARRED: usize = 64;

/// The median as a quantile, in units of 1/2^32.
const MEDIAN: u32 = 1 << 31;

impl Scheduler {
    /// Starts waiting requests in the order of the policy.
    pub(super) fn admit_waiting(&mut self, plan: &mut StepPlan) {
        if self.waiting.len() == 0 || plan.is_short_of_pages {
            return;
        }
        self.waiting.begin_round();
        if self.waiting.has_none_to_start() || !self.has_room_to_start(plan) {
            return;
        }
        self.keep_pages_of_running();
        self.admit_by_policy(plan);
        self.note_passed_over(plan);
    }

    /// Starts preempted requests first, unless the policy sorts them among the others. Then starts aged requests, and
    /// then the requests with the smallest keys.
    fn admit_by_policy(&mut self, plan: &mut StepPlan) {
        while let Some(index) = self.waiting.first_preempted() {
            let started = self.try_start(index, plan);
            if matches!(started, Err(Held::NoRoom | Held::ByAged)) {
                return;
            }
        }
        if let PrefillAdmissionPolicy::Pack {
            lookahead,
            force_fifo_every,
        } = self.config.prefill_admission_policy
            && !self.is_fifo_round(force_fifo_every)
        {
            return self.admit_packed(lookahead, plan);
        }
        let aged = self.admit_aged(plan);
        let Some(lookahead) = self.policy.lookahead else {
            if let Some(aged) = aged {
                plan.round.aged = self.aged_request(aged, plan);
            }
            return self.admit_in_order(plan);
        };
        if aged.is_some() || !self.has_room_to_start(plan) {
            return;
        }
        for (_, index) in self.look_ahead(lookahead, plan) {
            if self.try_start(index, plan) == Err(Held::NoRoom) {
                return;
            }
        }
    }

    /// Starts requests in the order of the queue, until one does not fit. Skips requests that would delay the aged
    /// request.
    fn admit_in_order(&mut self, plan: &mut StepPlan) {
        let mut barred = Vec::new();
        while let Some(index) = self.waiting.first_but(&barred) {
            match self.try_start(index, plan) {
                Ok(()) | Err(Held::ByLeader) => {}
                Err(Held::ByAged) if barred.len() < MAX_BARRED => barred.push(index),
                Err(Held::NoRoom | Held::ByAged) => return,
            }
        }
    }

    /// The key of the most urgent waiting request, and the request.
    pub(super) fn most_urgent_waiting(&mut self, plan: &StepPlan) -> Option<(i64, RequestIndex)> {
        match self.policy.lookahead {
            None => { self.waiting.first() }.map(|index| (self.requests[index].rank().key, index)),
            Some(lookahead) => self.look_ahead(lookahead, plan).first().copied(),
        }
    }

    /// The first `lookahead` requests of the queue, sorted by their present keys.
    fn look_ahead(&mut self, lookahead: u32, plan: &StepPlan) -> Vec<(i64, RequestIndex)> {
        let window = self.waiting.in_order().take(lookahead as usize);
        let mut by_key: Vec<_> = window.map(|index| (0, index)).collect();
        let page_size = self.config.page_size as usize;
        let mut num_compared = 0;
        for (key, index) in &mut by_key {
            let num_known = self.requests[*index].num_found_blocks() * page_size;
            let num_cached_rows = if !self.config.enable_prefix_caching {
                0
            } else if num_compared >= MAX_COMPARED_TOKENS {
                num_known as u32
            } else {
                let found = self.find_waiting(*index, plan.batch.step);
                let num_whole = found.path.len() * page_size;
                num_compared += page_size + num_whole.saturating_sub(num_known);
                found.num_rows(self.config.page_size)
            };
            *key = self.key(&self.requests[*index], num_cached_rows);
        }
        by_key.sort_by_key(|&(key, _)| key);
        by_key
    }

    /// The policy's key of a request in its present state.
    pub(super) fn key(&self, state: &RequestState, num_cached_rows: u32) -> i64 {
        let facts = RequestFacts {
            priority: state.request().priority,
            num_known_tokens: state.num_known_tokens(),
            num_cached_rows,
            num_tokens_left: &|| {
                let num_tokens = self.forecast.output_at(state, MEDIAN);
                num_tokens.saturating_sub(state.num_drawn_tokens())
            },
        };
        (self.policy.key)(&facts)
    }

    /// Sorts the running requests by their present keys.
    pub(super) fn rank_running(&mut self) {
        if !self.policy.ranks_running {
            return;
        }
        for index in self.running.iter() {
            let key = self.key(&self.requests[index], 0);
            self.requests[index].set_key(key);
        }
        self.running.sort(&self.requests);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::queue::waiting_queue::WaitingQueue;
    use crate::scheduler_config::policy::Policy;
    use crate::{BatchOutput, HeadRoom, Request, RequestId, Sample, SchedulerConfig};

    /// The request with the fewest output tokens left goes first, and takes the place of others.
    const LEAST_LEFT: Policy = Policy {
        key: |facts| (facts.num_tokens_left)().into(),
        lookahead: Some(4),
        ranks_running: true,
        overtakes: true,
        preempts: true,
    };

    fn scheduler(num_pages: u32, num_slots: u32, policy: Policy) -> Scheduler {
        let mut config = SchedulerConfig::new(num_pages, 4, 64);
        config.max_num_seqs = num_slots;
        config.head_room = HeadRoom::fixed_share(0);
        with_policy(config, policy)
    }

    fn with_policy(config: SchedulerConfig, policy: Policy) -> Scheduler {
        Scheduler {
            waiting: WaitingQueue::new(&config, &policy),
            policy,
            ..Scheduler::new(config).unwrap()
        }
    }

    /// Adds requests with prompts of three tokens. A request's id is the length of its output.
    fn add(scheduler: &mut Scheduler, lengths: &[u32]) {
        let request = |&length: &u32| {
            let prompt = [1, 2, 3].map(|token| 100 * length + token);
            Request::greedy(RequestId(length.into()), prompt.into(), length)
        };
        let requests = lengths.iter().map(request).collect();
        scheduler.add_requests(requests).unwrap();
    }

    /// Plays at most `num_steps` steps, and returns the requests that end in them.
    fn play(scheduler: &mut Scheduler, num_steps: usize) -> Vec<u64> {
        let mut ended = Vec::new();
        for _ in 0..num_steps {
            let Some(batch) = scheduler.schedule(0) else {
                break;
            };
            let drawing = batch.spans.iter().filter(|span| span.yields.draws());
            let sample = Sample {
                token: 7,
                logprobs: None,
            };
            scheduler.update_from_output(&BatchOutput {
                step: batch.step,
                samples: drawing.map(|span| (span.slot, sample.clone())).collect(),
                logprobs: Vec::new(),
                hidden_states: Vec::new(),
                undrawn: Vec::new(),
            });
            let outputs = core::iter::from_fn(|| scheduler.poll_output());
            let ends = outputs.filter(|output| output.finish.is_some());
            ended.extend(ends.map(|output| output.request.0));
            scheduler.check_invariants();
        }
        ended
    }

    #[test]
    fn waiting_requests_start_in_the_order_of_their_keys() {
        let mut scheduler = scheduler(64, 1, LEAST_LEFT);
        add(&mut scheduler, &[5, 3, 4]);
        assert_eq!(play(&mut scheduler, 100), [3, 4, 5]);
        assert_eq!(scheduler.stats().num_preemptions, 0);
    }

    /// The running request has 8 tokens left.
    #[test]
    fn a_waiting_request_takes_the_place_of_one_with_a_larger_key() {
        let mut scheduler = scheduler(64, 1, LEAST_LEFT);
        add(&mut scheduler, &[10]);
        assert_eq!(play(&mut scheduler, 2), []);
        add(&mut scheduler, &[9, 3]);
        assert_eq!(play(&mut scheduler, 100), [3, 10, 9]);
        assert_eq!(scheduler.stats().num_preemptions, 1);
    }

    /// With a lookahead, only the aged request may start. A preemption for another would leave a slot empty.
    #[test]
    fn nothing_is_preempted_for_others_while_an_aged_request_does_not_fit() {
        let mut config = SchedulerConfig::new(14, 2, 64);
        config.max_num_seqs = 3;
        config.max_passed_over = 2;
        config.head_room = HeadRoom::fixed_share(0);
        let mut scheduler = with_policy(config, LEAST_LEFT);
        let request = |id: u32, num_prompt_tokens: u32, max_tokens| {
            let prompt = (0..num_prompt_tokens).map(|at| 100 * id + at);
            Request::greedy(RequestId(id.into()), prompt.collect(), max_tokens)
        };
        let running = [0, 1, 2].map(|id| request(id, 4, 9));
        scheduler.add_requests(running.into()).unwrap();
        assert_eq!(play(&mut scheduler, 1), []);
        let (large, short) = (request(3, 19, 9), request(4, 2, 1));
        scheduler.add_requests(vec![large, short]).unwrap();
        assert_eq!(play(&mut scheduler, 2), [4]);
        // Request 5 has fewer tokens left than 0, 1 and 2, and takes the place of none. Request 2 gives way for pages.
        scheduler.add_requests(vec![request(5, 2, 3)]).unwrap();
        assert_eq!(play(&mut scheduler, 6), [0, 1]);
        assert_eq!(play(&mut scheduler, 100), [3, 5, 2]);
    }

    /// The earlier request has more tokens left. It gives way to the later one only if keys rank running requests.
    #[test]
    fn the_request_with_the_largest_key_is_preempted_for_pages() {
        let ranked = [(true, [6, 16]), (false, [16, 6])];
        for (ranks_running, expected) in ranked {
            let policy = Policy {
                ranks_running,
                preempts: false,
                ..LEAST_LEFT
            };
            let mut scheduler = scheduler(5, 2, policy);
            add(&mut scheduler, &[16]);
            assert_eq!(play(&mut scheduler, 6), []);
            add(&mut scheduler, &[6]);
            assert_eq!(play(&mut scheduler, 100), expected);
            assert_eq!(scheduler.stats().num_preemptions, 1);
        }
    }
}
