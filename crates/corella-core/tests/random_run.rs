//! Whole random runs of the scheduler against an executor that checks what it is told.
//!
//! `SEED=n cargo test -p corella-core --test random_run` plays one run again; `NUM_RUNS=n`
//! plays more of them.

mod fake_executor;

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{
    AdmissionError, FinishReason, Namespace, PrefillAdmissionPolicy, Request, RequestError,
    RequestId, SamplingParams, Scheduler, SchedulerConfig, SlotId, StoppingCriteria, TokenId,
};
use fake_executor::{FakeExecutor, Returned, UNDEFINED};

const NUM_RUNS: u64 = 1000;
const NUM_OPERATIONS: usize = 300;

#[test]
fn outputs_equal_lone_runs() {
    if let Ok(seed) = std::env::var("SEED") {
        Run::play(seed.parse().unwrap());
        return;
    }
    let num_runs = std::env::var("NUM_RUNS").map_or(NUM_RUNS, |runs| runs.parse().unwrap());
    let mut totals = Totals::default();
    for seed in 0..num_runs {
        totals.add(&Run::play(seed));
    }
    println!("{totals:?}");
    // The runs are worth something only when all of this happens in them.
    assert!(totals.num_operations >= 100_000, "{totals:?}");
    for count in [
        totals.num_preemptions,
        totals.num_evicted_pages,
        totals.num_prefix_hit_tokens,
        totals.num_row_copies,
        totals.num_failed_steps,
        totals.num_aborted,
        totals.num_completed,
    ] {
        assert!(count >= 500, "{totals:?}");
    }
}

#[derive(Debug, Default)]
struct Totals {
    num_operations: u64,
    num_preemptions: u64,
    num_evicted_pages: u64,
    num_prefix_hit_tokens: u64,
    num_row_copies: u64,
    num_failed_steps: u64,
    num_aborted: u64,
    num_completed: u64,
}

impl Totals {
    fn add(&mut self, run: &Totals) {
        self.num_operations += run.num_operations;
        self.num_preemptions += run.num_preemptions;
        self.num_evicted_pages += run.num_evicted_pages;
        self.num_prefix_hit_tokens += run.num_prefix_hit_tokens;
        self.num_row_copies += run.num_row_copies;
        self.num_failed_steps += run.num_failed_steps;
        self.num_aborted += run.num_aborted;
        self.num_completed += run.num_completed;
    }
}

struct Run {
    random: Random,
    config: SchedulerConfig,
    scheduler: Scheduler,
    executor: FakeExecutor,
    alphabet: u32,
    requests: BTreeMap<RequestId, Expected>,
    slots: BTreeMap<SlotId, RequestId>,
    /// Sequences to build prompts from.
    known: Vec<Vec<TokenId>>,
    failed: BTreeSet<RequestId>,
    now_us: u64,
    totals: Totals,
}

struct Expected {
    request: Request,
    output: Vec<TokenId>,
    finish: FinishReason,
    num_seen: usize,
    is_aborted: bool,
    ended: Option<FinishReason>,
}

impl Run {
    fn play(seed: u64) -> Totals {
        let _seed = NameSeed(seed);
        let mut random = Random(seed);
        let config = random_config(&mut random);
        let alphabet = 2 + random.below(3) as u32;
        let mut run = Run {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            executor: FakeExecutor::new(&config, alphabet),
            alphabet,
            random,
            config,
            requests: BTreeMap::new(),
            slots: BTreeMap::new(),
            known: vec![Vec::new()],
            failed: BTreeSet::new(),
            now_us: 0,
            totals: Totals::default(),
        };
        for _ in 0..NUM_OPERATIONS {
            run.operate();
        }
        run.drain();
        let stats = run.scheduler.stats();
        run.totals.num_preemptions = stats.num_preemptions;
        run.totals.num_evicted_pages = stats.num_evicted_pages;
        run.totals.num_prefix_hit_tokens = stats.num_prefix_hit_tokens;
        run.totals
    }

    fn operate(&mut self) {
        match self.random.below(100) {
            0..20 => self.add(),
            20..24 => self.abort(),
            24..25 => {
                let in_use = self.scheduler.stats().num_in_use_pages;
                assert_eq!(self.scheduler.reset_prefix_cache().is_ok(), in_use == 0);
            }
            25..65 => {
                self.step();
            }
            _ => self.wait(),
        }
        self.after_operation();
    }

    /// Everything ends, whatever was going on.
    fn drain(&mut self) {
        while self.scheduler.has_unfinished() {
            let planned = self.step();
            assert!(
                planned || self.executor.num_inflight() > 0,
                "requests are left and nothing happens: {:?}",
                self.scheduler.stats()
            );
            if !planned || self.random.below(2) == 0 {
                self.wait();
            }
            self.after_operation();
        }
        for (id, expected) in &self.requests {
            assert!(expected.ended.is_some(), "request {id} never ended");
        }
        let stats = self.scheduler.stats();
        assert_eq!(stats.num_in_use_pages, 0);
        assert_eq!(
            stats.num_free_pages + stats.num_cached_pages,
            stats.num_pages
        );
        self.scheduler.reset_prefix_cache().unwrap();
        assert_eq!(self.scheduler.stats().num_free_pages, stats.num_pages);
    }

    fn after_operation(&mut self) {
        self.totals.num_operations += 1;
        self.scheduler.check_invariants();
        let stats = self.scheduler.stats();
        let sum = stats.num_free_pages + stats.num_cached_pages + stats.num_in_use_pages;
        assert_eq!(sum, stats.num_pages);
        self.take_outputs();
    }

    fn add(&mut self) {
        let num_choices = 1 + self.random.below(2) * self.random.below(3);
        let prompt = self.random_prompt();
        let mut stopping = StoppingCriteria {
            max_tokens: (self.random.below(8) > 0).then(|| 1 + self.random.below(24) as u32),
            min_tokens: self.random.below(2) as u32 * self.random.below(6) as u32,
            ..StoppingCriteria::default()
        };
        if self.random.below(2) == 0 {
            stopping.end_token_ids.push(0);
        }
        if self.random.below(4) == 0 && self.alphabet > 2 {
            stopping.stop_token_ids.push(1);
        }
        let salt = (self.random.below(6) == 0).then(|| "salt".into());
        let priority = self.random.below(2) as i32 * self.random.below(3) as i32;
        let first_id = self.requests.len() as u64;
        let choices: Vec<_> = (0..num_choices as u32)
            .map(|choice| Request {
                id: RequestId(first_id + u64::from(choice)),
                prompt: prompt.clone(),
                sampling: SamplingParams {
                    choice,
                    ..SamplingParams::GREEDY
                },
                stopping: stopping.clone(),
                priority,
                arrival_us: self.now_us,
                namespace: Namespace {
                    lora: None,
                    cache_salt: salt.clone(),
                },
            })
            .collect();
        let num_waiting = self.scheduler.stats().num_waiting;
        match self.scheduler.add_requests(choices.clone()) {
            Ok(()) => {
                for request in choices {
                    let expected = self.expect(request);
                    self.requests.insert(expected.request.id, expected);
                }
            }
            Err(AdmissionError::QueueFull { .. }) => {}
            Err(_) => {
                assert!(self.config.check_request(&choices[0]).is_err());
                assert_eq!(self.scheduler.stats().num_waiting, num_waiting);
            }
        }
    }

    fn expect(&mut self, request: Request) -> Expected {
        let max_tokens = self.config.check_request(&request).unwrap() as usize;
        let stopping = &request.stopping;
        let (end, stop) = (&stopping.end_token_ids, &stopping.stop_token_ids);
        let masked: Vec<_> = end.iter().chain(stop).copied().collect();
        let min_tokens = stopping.min_tokens as usize;
        let mut output = FakeExecutor::lone_run(
            self.alphabet,
            &request.prompt,
            max_tokens,
            &masked,
            min_tokens,
        );
        let mut finish = FinishReason::Length;
        if let Some(at) = output.iter().position(|token| masked.contains(token)) {
            output.truncate(at + 1);
            finish = if end.contains(&output[at]) {
                FinishReason::EndToken
            } else {
                FinishReason::StopToken
            };
        }
        let mut whole = request.prompt.clone();
        whole.extend(&output);
        self.known.push(whole);
        Expected {
            request,
            output,
            finish,
            num_seen: 0,
            is_aborted: false,
            ended: None,
        }
    }

    /// New tokens behind a part of something known.
    fn random_prompt(&mut self) -> Vec<TokenId> {
        let at = self.random.below(self.known.len() as u64) as usize;
        let known = &self.known[at];
        let keep = match self.random.below(3) {
            0 => known.len(),
            _ => self.random.below(known.len() as u64 + 1) as usize,
        };
        let mut prompt = known[..keep].to_vec();
        let most = 1 + self.config.max_model_len as u64 / 2;
        for _ in 0..self.random.below(most) * self.random.below(2) {
            prompt.push(self.random.below(self.alphabet.into()) as TokenId);
        }
        prompt
    }

    fn abort(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let first = self.requests.len().saturating_sub(8) as u64;
        let id = RequestId(first + self.random.below(8));
        let Some(expected) = self.requests.get_mut(&id) else {
            assert!(!self.scheduler.abort_request(id));
            return;
        };
        let was_live = expected.ended.is_none();
        expected.is_aborted = was_live;
        assert_eq!(self.scheduler.abort_request(id), was_live);
        self.totals.num_aborted += u64::from(was_live);
    }

    fn step(&mut self) -> bool {
        self.now_us += 10;
        let Some(batch) = self.scheduler.schedule(self.now_us) else {
            return false;
        };
        self.totals.num_row_copies += batch.copies.len() as u64;
        for start in &batch.started {
            self.slots.insert(start.slot, start.request);
            let expected = &self.requests[&start.request];
            let prompt = &expected.request.prompt;
            let sequence: Vec<_> = prompt.iter().chain(&expected.output).copied().collect();
            assert!(sequence.starts_with(&start.cached_tokens));
        }
        for span in &batch.spans {
            let expected = &self.requests[&self.slots[&span.slot]];
            let num_prompt_tokens = expected.request.prompt.len();
            let max_tokens = self.config.check_request(&expected.request).unwrap() as usize;
            let end = span.start as usize + span.tokens.len();
            assert!(
                end < num_prompt_tokens + max_tokens,
                "computes past max_tokens"
            );
            assert!(
                !span.sample || end >= num_prompt_tokens,
                "a middle chunk draws"
            );
        }
        let fails = self.random.below(40) == 0;
        self.executor.submit(&batch, fails);
        true
    }

    fn wait(&mut self) {
        if self.executor.num_inflight() == 0 {
            return;
        }
        match self.executor.wait() {
            Returned::Output(output) => self.scheduler.update_from_output(&output),
            Returned::Failed(step, requests) => {
                self.totals.num_failed_steps += 1;
                self.failed.extend(requests);
                self.scheduler.handle_step_failed(step, "injected");
            }
        }
    }

    fn take_outputs(&mut self) {
        while let Some(output) = self.scheduler.poll_output() {
            let id = output.request;
            let expected = self.requests.get_mut(&id).expect("a known request");
            assert!(
                expected.ended.is_none(),
                "request {id} speaks after its end"
            );
            if let Some(sample) = &output.sample {
                assert_ne!(
                    sample.token, UNDEFINED,
                    "request {id} gets an undefined token"
                );
                let should = expected.output.get(expected.num_seen);
                assert_eq!(
                    Some(&sample.token),
                    should,
                    "request {id} differs from its lone run"
                );
                expected.num_seen += 1;
            }
            assert_eq!(output.num_output_tokens as usize, expected.num_seen);
            assert_eq!(
                output.num_prompt_tokens as usize,
                expected.request.prompt.len()
            );
            assert!(output.num_cached_tokens < output.num_prompt_tokens);
            match &output.finish {
                None => {}
                Some(FinishReason::Aborted) => assert!(expected.is_aborted),
                Some(FinishReason::Error(RequestError::StepFailed(_))) => {
                    assert!(
                        self.failed.contains(&id),
                        "request {id} was in no failed step"
                    );
                }
                Some(FinishReason::Error(RequestError::PreemptedTooOften { .. })) => {
                    assert!(self.config.max_preemptions < 100);
                }
                Some(FinishReason::Error(error)) => panic!("request {id}: {error}"),
                Some(finish) => {
                    assert_eq!(*finish, expected.finish);
                    assert_eq!(expected.num_seen, expected.output.len());
                    self.totals.num_completed += 1;
                }
            }
            expected.ended = output.finish;
        }
    }
}

fn random_config(random: &mut Random) -> SchedulerConfig {
    let page_size = 1 + random.below(5) as u32;
    let num_pages = 3 + random.below(20) as u32;
    let max_model_len = (num_pages * page_size * (1 + random.below(2) as u32)).max(2);
    let mut config = SchedulerConfig::new(num_pages, page_size, max_model_len);
    config.max_num_seqs = 1 + random.below(6) as u32;
    config.max_num_batched_tokens = config.max_num_seqs + random.below(24) as u32;
    config.max_prefill_tokens = 1 + random.below(24) as u32;
    config.long_prefill_token_threshold = random.below(2) as u32 * random.below(8) as u32;
    config.max_queued_requests = 12;
    config.max_inflight_steps = 1 + random.below(3) as u32;
    config.enable_prefix_caching = random.below(6) > 0;
    config.enable_chunked_prefill = random.below(5) > 0;
    config.max_passed_over = 1 + random.below(4) as u32;
    config.new_token_ratio = SchedulerConfig::RATIO_ONE / 3 * random.below(4) as u32;
    config.max_preemptions = [1, 100_000][random.below(2) as usize];
    if random.below(3) == 0 {
        config.max_prefill_seqs = 1 + random.below(3) as u32;
    }
    if random.below(3) == 0 {
        config.max_decode_seqs = 1 + random.below(3) as u32;
    }
    if random.below(2) == 0 {
        config.prefill_admission_policy = PrefillAdmissionPolicy::Pack {
            lookahead: 1 + random.below(8) as u32,
            force_fifo_every: random.below(5) as u32,
        };
    }
    config
}

/// Says which run it was.
struct NameSeed(u64);

impl Drop for NameSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("play it again with SEED={}", self.0);
        }
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
