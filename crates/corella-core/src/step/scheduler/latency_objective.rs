//! With `enable_slo_admission`, requests that cannot meet their latency objectives are refused or ended early.

use crate::cache::kv_cache::FoundPrefix;
use crate::cache::prefix_tree::KnownPath;
use crate::latency_objective::Expected;
use crate::request_state::RequestState;
use crate::{AdmissionError, FinishReason, LatencyObjectives, Request, RequestError, Scheduler};

impl Scheduler {
    /// Refuses a new request that would be too late, because other work comes first. If the policy lets it overtake
    /// waiting requests, only its own prompt and started prompts count.
    pub(super) fn check_objectives(&mut self, request: &Request) -> Result<(), AdmissionError> {
        let objectives = request.objectives;
        if !self.config.enable_slo_admission || objectives == LatencyObjectives::default() {
            return Ok(());
        }
        let begun = self.running.iter().map(|index| &self.requests[index]);
        let begun = begun.filter(|state| state.is_prefilling());
        let num_begun: u64 = begun
            .map(|state| u64::from(state.num_left_to_prefill()))
            .sum();
        let num_before = match self.config.starts_in_order() {
            true => num_begun + self.num_uncached(self.waiting.num_new_tokens()),
            false => num_begun,
        };
        let mut num_cached = 0;
        let takes_hits = request.takes_hits() && request.sampling.prompt_logprobs.is_none();
        if self.config.enable_prefix_caching && takes_hits {
            let tokens = &request.prompt[..request.prompt.len() - 1];
            let namespace = &request.namespace;
            let known = &mut KnownPath::default();
            let step = self.inflight.next_step();
            let found = self.kv.find_prefix(namespace, tokens, step, known);
            num_cached = self.num_tokens_of(&found);
        }
        let num_tokens = num_before + request.prompt.len() as u64 - num_cached;
        let expected = Expected {
            ttft_us: self.pace.prefill_us(num_tokens),
            tpot_us: self.expected_tpot_us(),
        };
        expected.missed(objectives).map_or(Ok(()), |missed| {
            self.journal.counters().num_missed_objectives += 1;
            Err(AdmissionError::ObjectiveMissed(missed))
        })
    }

    /// Ends the requests that wait for their first admission and would be too late even if they were admitted now.
    pub(super) fn drop_late(&mut self) {
        if !self.config.enable_slo_admission {
            return;
        }
        let tpot_us = self.expected_tpot_us();
        while let Some(index) = self.waiting.first_late(self.pace.now_us(), tpot_us) {
            // So far, the whole prompt counted as uncached. The cached prefix is looked up only now.
            let mut num_cached = 0;
            if self.config.enable_prefix_caching {
                let found = self.find_waiting(index, self.inflight.next_step());
                num_cached = self.num_tokens_of(&found);
            }
            let state = &self.requests[index];
            let expected = self.expected(state, num_cached, tpot_us);
            match expected.missed(state.request().objectives) {
                Some(missed) => {
                    self.journal.counters().num_missed_objectives += 1;
                    let error = RequestError::ObjectiveMissed(missed);
                    self.finish(index, FinishReason::Error(error), None);
                }
                None => {
                    let state = &mut self.requests[index];
                    self.waiting.watch_on(index, state, num_cached, &self.pace);
                }
            }
        }
    }

    /// The latencies of a waiting request if it is admitted now.
    fn expected(&self, state: &RequestState, num_cached: u64, tpot_us: u64) -> Expected {
        let waited_us = self
            .pace
            .now_us()
            .saturating_sub(state.request().arrival_us);
        let num_tokens = u64::from(state.num_prompt_tokens()) - num_cached;
        Expected {
            ttft_us: waited_us + self.pace.prefill_us(num_tokens),
            tpot_us,
        }
    }

    fn num_tokens_of(&self, found: &FoundPrefix) -> u64 {
        found.path.len() as u64 * u64::from(self.config.page_size)
    }

    /// Refuses a reservation whose tokens would come too slowly. The prefill node sets an objective only if it wants
    /// this check.
    pub(super) fn check_reserved_pace(&mut self, request: &Request) -> Result<(), AdmissionError> {
        let expected = Expected {
            ttft_us: 0,
            tpot_us: self.expected_tpot_us(),
        };
        expected
            .missed(request.objectives)
            .map_or(Ok(()), |missed| {
                self.journal.counters().num_missed_objectives += 1;
                Err(AdmissionError::ObjectiveMissed(missed))
            })
    }

    /// Returns the time per output token of one more request: the duration of a decode step, times the number of steps
    /// in which each request that decodes or waits for its KV has one turn. Only `max_num_seqs` requests decode at a
    /// time. It is 0 without such requests.
    pub(super) fn expected_tpot_us(&self) -> u64 {
        let decoding = self.running.iter().map(|index| &self.requests[index]);
        let num_decoding = decoding.filter(|state| !state.is_prefilling()).count();
        let num_decoding = (num_decoding + self.remote_kv.len()) as u64;
        if num_decoding == 0 {
            return 0;
        }
        let num_sharing = (num_decoding + 1).min(self.config.max_num_seqs.into());
        let num_steps = num_sharing.div_ceil(self.config.max_decode_seqs.into());
        self.pace.decode_step_us() * num_steps
    }

    /// The part of `num_tokens` prompt tokens that will have to be computed, by the hit rate so far.
    fn num_uncached(&self, num_tokens: u64) -> u64 {
        let counters = self.journal.counts();
        let asked = counters.num_prefix_query_tokens.max(1);
        let missed = asked.saturating_sub(counters.num_prefix_hit_tokens);
        let product = u128::from(num_tokens) * u128::from(missed);
        (product / u128::from(asked)) as u64
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::{
        Batch, BatchOutput, MissedObjective, ObjectiveKind, RequestId, Sample, SchedulerConfig,
    };

    const STEP_US: u64 = 1000;

    /// A scheduler whose steps hold 64 tokens and take a millisecond each.
    struct Run {
        scheduler: Scheduler,
        now_us: u64,
        ends: Vec<(u64, FinishReason)>,
    }

    impl Run {
        fn new(is_on: bool) -> Self {
            let mut config = SchedulerConfig::new(512, 4, 1024);
            config.max_num_batched_tokens = 64;
            config.max_num_seqs = 4;
            config.max_decode_seqs = 4;
            config.enable_slo_admission = is_on;
            let mut run = Self {
                scheduler: Scheduler::new(config).unwrap(),
                now_us: 0,
                ends: Vec::new(),
            };
            // Before the first step has returned, no duration is known, and no request is refused.
            run.add(0, 640, 1, 1).unwrap();
            run.steps(20);
            run.ends.clear();
            run
        }

        fn add(
            &mut self,
            id: u64,
            num_tokens: u32,
            max_tokens: u32,
            ttft_us: u64,
        ) -> Result<(), AdmissionError> {
            let prompt = (0..num_tokens).map(|i| i + id as u32 * 7919).collect();
            let mut request = Request::greedy(RequestId(id), prompt, max_tokens);
            request.arrival_us = self.now_us;
            request.objectives.ttft_us = Some(ttft_us);
            self.scheduler.add_requests(vec![request])
        }

        fn steps(&mut self, num_steps: usize) {
            for _ in 0..num_steps {
                let batch = self.scheduler.schedule(self.now_us);
                self.now_us += STEP_US;
                if let Some(batch) = batch {
                    self.scheduler.update_from_output(&output(&batch));
                }
                while let Some(output) = self.scheduler.poll_output() {
                    if let Some(finish) = output.finish {
                        self.ends.push((output.request.0, finish));
                    }
                }
                self.scheduler.check_invariants();
            }
        }
    }

    fn output(batch: &Batch) -> BatchOutput {
        let drawing = batch.spans.iter().filter(|span| span.yields.draws());
        let sample = Sample {
            token: 1,
            logprobs: None,
        };
        BatchOutput {
            step: batch.step,
            samples: drawing.map(|span| (span.slot, sample.clone())).collect(),
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        }
    }

    fn ttft(expected_us: u64, objective_us: u64) -> MissedObjective {
        MissedObjective {
            kind: ObjectiveKind::Ttft,
            expected_us,
            objective_us,
        }
    }

    #[test]
    fn too_late_behind_the_queue_is_refused_at_once() {
        let mut run = Run::new(true);
        assert_eq!(run.add(1, 640, 1, 10_000), Ok(()));
        let missed = ttft(20_000, 19_000);
        assert_eq!(
            run.add(2, 640, 1, 19_000),
            Err(AdmissionError::ObjectiveMissed(missed))
        );
        assert_eq!(run.add(3, 640, 1, 20_000), Ok(()));
        run.steps(3);
        let missed = ttft(17_000 + 10_000, 26_000);
        assert_eq!(
            run.add(4, 640, 1, 26_000),
            Err(AdmissionError::ObjectiveMissed(missed))
        );
        run.steps(30);
        assert_eq!(
            run.ends,
            [(1, FinishReason::Length), (3, FinishReason::Length)]
        );
        assert_eq!(run.scheduler.stats().num_missed_objectives, 2);
    }

    #[test]
    fn what_becomes_too_late_while_it_waits_is_ended() {
        let mut run = Run::new(true);
        // All four slots decode for a long time. The prompt of request 5 waits for a slot. Started at once, it would
        // have been in time.
        for id in 1..5 {
            run.add(id, 16, 40, 50_000).unwrap();
        }
        run.steps(2);
        run.add(5, 128, 1, 10_000).unwrap();
        run.add(6, 128, 1, 500_000).unwrap();
        run.steps(9);
        assert_eq!(run.ends, []);
        run.steps(1);
        let missed = ttft(9_000 + 2_000, 10_000);
        let error = FinishReason::Error(RequestError::ObjectiveMissed(missed));
        assert_eq!(run.ends, [(5, error)]);
        run.steps(60);
        assert_eq!(run.ends.len(), 6);
    }

    #[test]
    fn cached_prompts_are_cheap() {
        let mut run = Run::new(true);
        run.add(1, 640, 1, 10_000).unwrap();
        run.steps(12);
        let mut again = Request::greedy(RequestId(2), (0..640).map(|i| i + 7919).collect(), 1);
        again.arrival_us = run.now_us;
        again.objectives.ttft_us = Some(1000);
        assert_eq!(run.scheduler.add_requests(vec![again]), Ok(()));
    }

    #[test]
    fn decoding_slower_than_asked_for_is_refused() {
        let mut run = Run::new(true);
        for id in 1..4 {
            run.add(id, 16, 40, 50_000).unwrap();
        }
        run.steps(4);
        let mut request = Request::greedy(RequestId(9), vec![1, 2, 3], 4);
        request.objectives.tpot_us = Some(STEP_US - 1);
        let missed = MissedObjective {
            kind: ObjectiveKind::Tpot,
            expected_us: STEP_US,
            objective_us: STEP_US - 1,
        };
        let refused = Err(AdmissionError::ObjectiveMissed(missed));
        assert_eq!(run.scheduler.add_requests(vec![request.clone()]), refused);
        request.objectives.tpot_us = Some(STEP_US);
        assert_eq!(run.scheduler.add_requests(vec![request]), Ok(()));
    }

    /// A request that waits for a slot shares no step with more than the other slots.
    #[test]
    fn full_slots_slow_no_decode_step() {
        let mut run = Run::new(true);
        for id in 1..5 {
            run.add(id, 16, 40, 50_000).unwrap();
        }
        run.steps(4);
        let mut request = Request::greedy(RequestId(9), vec![1, 2, 3], 4);
        request.objectives.tpot_us = Some(STEP_US);
        assert_eq!(run.scheduler.add_requests(vec![request]), Ok(()));
    }

    #[test]
    fn no_request_is_refused_unless_asked_for() {
        let mut run = Run::new(false);
        for id in 1..20 {
            run.add(id, 640, 1, 1).unwrap();
        }
        run.steps(250);
        assert!(run.ends.iter().all(|(_, end)| *end == FinishReason::Length));
        assert_eq!(run.ends.len(), 19);
    }
}
