//! The engine over the mock executor, which notices every wrong page.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::{
    AdmissionError, Batch, BatchOutput, FinishReason, KvEvent, Namespace, PageHash, PageId,
    PinError, RequestError, RequestOutput, SamplingParams, SchedulerConfig, Speculation, StepId,
    StoppingCriteria, TokenId,
};
use corella_engine::{
    Engine, EngineConfig, EngineError, EngineState, EngineStats, PinPrefixError, StreamEvent,
    Submission, SubmitError, TokenStream,
};
use corella_model::{
    CostModel, Executor, ExecutorError, ExecutorInfo, Fault, KvLayout, MockConfig, MockEcho,
    MockEnd, MockExecutor, TokenMask,
};

const VOCAB_SIZE: usize = 50;
const LONG: Duration = Duration::from_secs(60);

fn limits(num_pages: u32, max_inflight_steps: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_prefill_tokens: 32,
        max_queued_requests: 256,
        new_token_ratio: SchedulerConfig::RATIO_ONE / 8,
        max_preemptions: 1000,
        max_inflight_steps,
        ..SchedulerConfig::new(num_pages, 4, 128)
    }
}

fn model(limits: &SchedulerConfig) -> MockConfig {
    MockConfig::new(VOCAB_SIZE, limits.num_pages, limits.page_size)
}

fn start(limits: SchedulerConfig, mock: MockConfig) -> Engine {
    start_with(EngineConfig::new(limits), mock)
}

fn start_with(config: EngineConfig, mock: MockConfig) -> Engine {
    Engine::start(config, Box::new(MockExecutor::new(mock))).expect("the engine starts")
}

fn submission(prompt: Vec<TokenId>, max_tokens: u32) -> Submission {
    Submission {
        prompt,
        sampling: SamplingParams::GREEDY,
        num_choices: 1,
        stopping: StoppingCriteria {
            max_tokens: Some(max_tokens),
            ..Default::default()
        },
        priority: 0,
        objectives: Default::default(),
        namespace: Namespace::default(),
    }
}

fn submit_one(engine: &Engine, submission: Submission) -> TokenStream {
    let mut streams = engine.submit(submission).expect("it is taken");
    assert_eq!(streams.len(), 1);
    streams.remove(0)
}

/// Reads to the end and checks the order of events on the way.
fn finish(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    read_outputs(stream)
}

fn read_outputs(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = Vec::new();
    loop {
        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
            panic!("the stream ended without a terminal event");
        };
        assert_eq!(output.request, stream.id());
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(reason) = output.finish {
            assert_eq!(stream.next_blocking(), None);
            assert_eq!(stream.next_blocking(), None);
            return (tokens, reason);
        }
        assert_eq!(output.num_output_tokens as usize, tokens.len());
    }
}

fn assert_failed(reason: &FinishReason, text: &str) {
    let FinishReason::Error(error) = reason else {
        panic!("expected an error, got {reason:?}");
    };
    assert!(error.to_string().contains(text), "{error}");
}

/// Nothing is in use any more, once the steps that were planned ahead have returned.
fn assert_at_rest(engine: &Engine) {
    assert!(engine.wait_idle(LONG));
    wait_until(|| engine.stats().scheduler.num_inflight_steps == 0);
    let stats = engine.stats();
    assert_eq!(stats.num_live_requests, 0);
    assert_eq!(stats.scheduler.num_running, 0);
    assert_eq!(stats.scheduler.num_waiting, 0);
    assert_eq!(stats.scheduler.num_in_use_pages, 0);
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

/// A small generator: equal seeds give equal tests.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % sides as u64) as usize
    }

    /// Often begins like others, so that prefixes are shared.
    fn prompt(&mut self) -> Vec<TokenId> {
        let shared = self.roll(24);
        let own = 1 + self.roll(24);
        let family = self.roll(3) as TokenId;
        (0..shared)
            .map(|i| (i as TokenId * 7 + family) % VOCAB_SIZE as TokenId)
            .chain((0..own).map(|_| self.roll(VOCAB_SIZE) as TokenId))
            .collect()
    }

    fn sampling(&mut self) -> SamplingParams {
        let mut sampling = SamplingParams::GREEDY;
        if self.roll(2) == 0 {
            sampling.temperature = 1.0;
            sampling.seed = self.roll(1000) as u64;
        }
        sampling
    }
}

fn outputs_equal_lone_runs(max_inflight_steps: u32) {
    let limits = limits(40, max_inflight_steps);
    let mock = model(&limits);
    let stats = requests_come_and_go(limits, mock);
    assert_eq!(stats.scheduler.num_draft_tokens, 0);
}

/// Whoever is served gets what it gets alone, whoever comes, leaves or is preempted meanwhile.
fn requests_come_and_go(limits: SchedulerConfig, mock: MockConfig) -> EngineStats {
    let max_inflight_steps = limits.max_inflight_steps;
    let engine = start(limits, mock.clone());
    let mut dice = Dice(u64::from(max_inflight_steps));
    for round in 0..6 {
        let mut readers = Vec::new();
        for _ in 0..64 {
            let mut submission = submission(dice.prompt(), 1 + dice.roll(60) as u32);
            submission.sampling = dice.sampling();
            let expected = mock.lone_tokens(
                &submission.prompt,
                &submission.sampling,
                submission.stopping.max_tokens.unwrap() as usize,
            );
            // Some leave: at once, or after a few tokens.
            let leaves_after = (dice.roll(4) == 0).then(|| dice.roll(expected.len() + 1));
            let mut stream = submit_one(&engine, submission);
            readers.push(std::thread::spawn(move || match leaves_after {
                None => assert_eq!(finish(&mut stream), (expected, FinishReason::Length)),
                Some(0) => {}
                Some(num_tokens) => {
                    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
                    for token in &expected[..num_tokens] {
                        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
                            panic!("no output");
                        };
                        assert_eq!(output.sample.unwrap().token, *token, "round {round}");
                    }
                }
            }));
        }
        for reader in readers {
            reader.join().expect("the reader's checks hold");
        }
        assert_at_rest(&engine);
    }
    let stats = engine.stats();
    assert!(stats.scheduler.num_preemptions > 0, "{stats:?}");
    assert!(stats.scheduler.num_evicted_pages > 0, "{stats:?}");
    assert!(stats.scheduler.num_prefix_hit_tokens > 0, "{stats:?}");
    assert!(stats.num_finished_abort > 0, "{stats:?}");
    assert_eq!(stats.num_finished_error, 0);
    assert_eq!(stats.num_failed_steps, 0);
    engine.reset_prefix_cache().expect("nothing runs");
    assert_eq!(engine.submit(submission(vec![1], 1)).unwrap().len(), 1);
    assert_at_rest(&engine);
    stats
}

#[test]
fn concurrent_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(1);
}

#[test]
fn overlapped_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(2);
}

fn guessing(limits: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig {
        speculation: Speculation::Ngram,
        max_draft_tokens: 6,
        ..limits
    }
}

/// Texts that repeat what stood `distance` before, three times in four.
fn echoing(limits: &SchedulerConfig, distance: usize) -> MockConfig {
    let mut mock = model(limits);
    mock.echo = Some(MockEcho {
        distance,
        probability: 0.75,
    });
    mock
}

#[test]
fn guessed_outputs_equal_lone_runs() {
    for (num_stages, distance) in [(1, 1), (1, 7), (2, 7)] {
        let mut limits = guessing(limits(40, num_stages));
        limits.num_pipeline_stages = num_stages;
        let mock = echoing(&limits, distance);
        let stats = requests_come_and_go(limits, mock).scheduler;
        let num_accepted = stats.num_accepted_draft_tokens;
        assert!(num_accepted > 1000, "{stats:?}");
        assert!(stats.num_draft_tokens - num_accepted > 1000, "{stats:?}");
    }
}

/// All that a caller sees of each token, and the end.
fn play(engine: &Engine, submissions: &[Submission]) -> Vec<Vec<RequestOutput>> {
    let submissions = submissions.iter().cloned();
    let streams: Vec<_> = submissions.map(|it| submit_one(engine, it)).collect();
    let read = |mut stream: TokenStream| {
        let mut outputs = Vec::new();
        while let Some(event) = stream.next_blocking() {
            if let StreamEvent::Output(mut output) = event {
                // These depend on who else was there.
                (output.queue_us, output.num_cached_tokens) = (0, 0);
                outputs.push(output);
            }
        }
        outputs
    };
    let outputs = streams.into_iter().map(read).collect();
    assert_at_rest(engine);
    outputs
}

#[test]
fn guesses_change_no_stop_limit_penalty_or_log_probability() {
    let limits = limits(400, 1);
    let mut mock = echoing(&limits, 4);
    mock.end = Some(MockEnd {
        token: 7,
        probability: 0.03,
        at_output: None,
    });
    let plain = start(limits.clone(), mock.clone());
    let guessing = start(guessing(limits), mock);
    let mut dice = Dice(3);
    let submissions: Vec<_> = (0..200)
        .map(|_| {
            let mut prompt: Vec<_> = dice.prompt().into_iter().map(|token| token % 9).collect();
            // So that there is something to guess before anything can stop it.
            let tail = prompt.split_off(prompt.len().saturating_sub(4));
            prompt.extend(tail.repeat(3));
            let mut submission = submission(prompt, 1 + dice.roll(60) as u32);
            submission.sampling = dice.sampling();
            let sampling = &mut submission.sampling;
            match dice.roll(4) {
                0 => sampling.repetition_penalty = 1.3,
                1 => {
                    sampling.frequency_penalty = 0.4;
                    sampling.presence_penalty = 0.2;
                }
                _ => {}
            }
            sampling.logprobs = (dice.roll(3) == 0).then_some(5);
            let stopping = &mut submission.stopping;
            stopping.min_tokens = dice.roll(2) as u32 * dice.roll(30) as u32;
            if dice.roll(4) != 0 {
                stopping.end_token_ids.push(7);
            }
            if dice.roll(2) == 0 {
                stopping.stop_token_ids.push(dice.roll(9) as TokenId);
            }
            submission
        })
        .collect();
    // All at once, then each alone.
    let together = submissions.chunks(submissions.len());
    for submissions in together.chain(submissions.chunks(1)) {
        let (guessed, expected) = (play(&guessing, submissions), play(&plain, submissions));
        for (at, (guessed, expected)) in guessed.iter().zip(&expected).enumerate() {
            assert_eq!(guessed, expected, "request {at}");
        }
    }
    let stats = guessing.stats().scheduler;
    assert_eq!(
        stats.num_generated_tokens,
        plain.stats().scheduler.num_generated_tokens
    );
    assert!(stats.num_accepted_draft_tokens > 500, "{stats:?}");
    assert_eq!(plain.stats().scheduler.num_draft_tokens, 0);
}

/// One of the guesses may be why: without them it is drawn, or the request ends as it would have.
#[test]
fn what_cannot_be_drawn_beside_guesses_is_drawn_without() {
    let limits = guessing(limits(200, 1));
    let mut mock = model(&limits);
    mock.echo = Some(MockEcho {
        distance: 3,
        probability: 1.0,
    });
    let prompt = vec![1, 2, 3, 1, 2, 3];
    let expected = mock.lone_tokens(&prompt, &SamplingParams::GREEDY, 40);
    mock.faults = vec![(StepId(1), Fault::Undrawn)];
    let engine = start(limits.clone(), mock.clone());
    let ends = finish(&mut submit_one(&engine, submission(prompt.clone(), 40)));
    assert_eq!(ends, (expected.clone(), FinishReason::Length));
    // Once it has failed nothing more is guessed, and the second time is the last.
    let num_draft_tokens = engine.stats().scheduler.num_draft_tokens;
    assert!((1..7).contains(&num_draft_tokens), "{num_draft_tokens}");
    assert_at_rest(&engine);
    mock.faults.push((StepId(2), Fault::Undrawn));
    let engine = start(limits, mock);
    let (tokens, reason) = finish(&mut submit_one(&engine, submission(prompt, 40)));
    assert_failed(&reason, "no token can be drawn: a fault was injected");
    assert_eq!(tokens, expected[..1]);
    assert_at_rest(&engine);
}

#[test]
fn choices_are_all_taken_and_differ_by_seed_and_index() {
    let limits = limits(200, 1);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let mut several = submission(vec![3, 1, 4, 1, 5], 12);
    several.sampling.temperature = 1.0;
    several.num_choices = 3;
    let streams = engine.submit(several.clone()).unwrap();
    assert_eq!(streams.len(), 3);
    let mut texts = Vec::new();
    for (choice, mut stream) in streams.into_iter().enumerate() {
        let mut sampling = several.sampling.clone();
        sampling.choice = choice as u32;
        let (tokens, reason) = finish(&mut stream);
        assert_eq!(reason, FinishReason::Length);
        assert_eq!(tokens, mock.lone_tokens(&several.prompt, &sampling, 12));
        texts.push(tokens);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2]);
}

#[test]
fn a_failing_or_panicking_step_ends_its_own_requests_only() {
    for fault in [Fault::Fail, Fault::Panic] {
        for max_inflight_steps in [1, 2] {
            let limits = limits(200, max_inflight_steps);
            let mut mock = model(&limits);
            let lone = mock.clone();
            mock.faults = vec![(StepId(5), fault)];
            let mut config = EngineConfig::new(limits);
            config.step_log_path = dump_path(&format!("{fault:?}-{max_inflight_steps}"));
            let dump = config.step_log_path.clone();
            let engine = start_with(config, mock);

            let mut victim = submit_one(&engine, submission(vec![1, 2, 3], 40));
            let (tokens, reason) = finish(&mut victim);
            assert_failed(&reason, "fault was injected");
            let expected = lone.lone_tokens(&[1, 2, 3], &SamplingParams::GREEDY, 40);
            assert!(!tokens.is_empty() && tokens.len() < 40);
            assert_eq!(tokens, expected[..tokens.len()]);

            // The same prompt again: nothing of the failed step is read.
            let mut next = submit_one(&engine, submission(vec![1, 2, 3], 40));
            assert_eq!(finish(&mut next), (expected, FinishReason::Length));
            assert_at_rest(&engine);
            let stats = engine.stats();
            assert_eq!(stats.num_failed_steps, 1);
            assert_eq!(stats.num_finished_error, 1);
            assert_eq!(engine.state(), EngineState::Ready);
            assert_eq!(dump.exists(), fault == Fault::Panic);
            if fault == Fault::Panic {
                let text = std::fs::read_to_string(&dump).unwrap();
                assert!(text.starts_with("step 5 panicked: a fault was injected"));
                // Steps are numbered from 0; with overlap one more was planned.
                assert_eq!(text.lines().count() as u32, 1 + 5 + max_inflight_steps);
                std::fs::remove_file(&dump).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_drawn_from_ends_one_request() {
    for max_inflight_steps in [1, 2] {
        let limits = limits(200, max_inflight_steps);
        let mut mock = model(&limits);
        let lone = mock.clone();
        mock.faults = vec![(StepId(5), Fault::Undrawn)];
        let engine = start(limits, mock);
        let prompts = [vec![1, 2, 3], vec![1, 2, 4], vec![9, 8, 7]];
        let mut streams = prompts
            .clone()
            .map(|prompt| submit_one(&engine, submission(prompt, 40)));
        let ends = streams.each_mut().map(finish);
        let failed = ends.iter().filter(|(tokens, _)| tokens.len() < 40);
        assert_eq!(failed.count(), 1);
        for (prompt, (tokens, reason)) in prompts.iter().zip(&ends) {
            let expected = lone.lone_tokens(prompt, &SamplingParams::GREEDY, 40);
            assert_eq!(*tokens, expected[..tokens.len()]);
            if tokens.len() < 40 {
                assert_failed(reason, "no token can be drawn: a fault was injected");
            }
        }
        assert_at_rest(&engine);
        assert_eq!(engine.stats().num_failed_steps, 0);
    }
}

fn dump_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("corella-test-{}-{name}.log", std::process::id()))
}

#[test]
fn a_lost_executor_ends_every_stream_and_refuses_what_follows() {
    let limits = limits(200, 2);
    let mut mock = model(&limits);
    mock.faults = vec![(StepId(4), Fault::Lost)];
    mock.cost = Some(CostModel {
        per_step_us: 2000.0,
        per_token_us: 0.0,
        per_attended_kilotoken_us: 0.0,
    });
    let mut config = EngineConfig::new(limits);
    config.step_log_path = dump_path("lost");
    let dump = config.step_log_path.clone();
    let engine = start_with(config, mock);
    // More than run at once, so that some still wait.
    let streams: Vec<_> = (0..40)
        .map(|i| submit_one(&engine, submission(vec![i], 100)))
        .collect();
    for mut stream in streams {
        // One that the loop never took has no `Accepted`.
        let mut last = None;
        while let Some(event) = stream.next_blocking() {
            last = Some(event);
        }
        let Some(StreamEvent::Output(output)) = last else {
            panic!("{last:?}");
        };
        assert!(matches!(
            output.finish,
            Some(FinishReason::Error(RequestError::EngineLost(_)))
        ));
        assert_failed(&output.finish.unwrap(), "fault was injected");
    }
    assert!(engine.wait_idle(LONG));
    let EngineState::Lost(reason) = engine.state() else {
        panic!("{:?}", engine.state());
    };
    assert!(reason.contains("fault was injected"));
    assert_eq!(
        engine.submit(submission(vec![1], 1)).err(),
        Some(SubmitError::Lost(reason))
    );
    assert!(engine.reset_prefix_cache().is_err());
    std::fs::remove_file(&dump).expect("the last steps were written down");
}

/// Forgets what it drew.
struct Forgetful(MockExecutor);

impl Executor for Forgetful {
    fn info(&self) -> ExecutorInfo {
        self.0.info()
    }

    fn kv_layout(&self) -> KvLayout {
        self.0.kv_layout()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.0.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.0.submit(batch)
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.0.sample(step, masks)
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let mut output = self.0.wait()?;
        if output.step.0 == 3 {
            output.samples.clear();
        }
        Ok(output)
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<(), ExecutorError> {
        self.0.read_page(page, out)
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ExecutorError> {
        self.0.write_page(page, bytes)
    }
}

#[test]
fn a_panic_of_the_loop_ends_every_stream_and_leaves_the_step_log() {
    let limits = limits(200, 1);
    let executor = Forgetful(MockExecutor::new(model(&limits)));
    let mut config = EngineConfig::new(limits);
    config.step_log_path = dump_path("loop");
    let dump = config.step_log_path.clone();
    let engine = Engine::start(config, Box::new(executor)).unwrap();
    let mut stream = submit_one(&engine, submission(vec![1, 2, 3], 40));
    let (tokens, reason) = finish(&mut stream);
    assert_eq!(tokens.len(), 3);
    assert_failed(&reason, "loop panicked");
    assert!(matches!(engine.state(), EngineState::Lost(_)));
    assert!(engine.wait_idle(LONG));
    let text = std::fs::read_to_string(&dump).unwrap();
    assert_eq!(text.lines().count(), 1 + 4, "{text}");
    std::fs::remove_file(&dump).unwrap();
}

#[test]
fn a_hanging_step_is_noticed_and_stays_correct() {
    let limits = limits(200, 1);
    let mut mock = model(&limits);
    let expected = mock.lone_tokens(&[7], &SamplingParams::GREEDY, 10);
    mock.faults = vec![(StepId(3), Fault::Hang(Duration::from_millis(300)))];
    let mut config = EngineConfig::new(limits);
    config.step_timeout = Duration::from_millis(50);
    let engine = start_with(config, mock);
    let mut stream = submit_one(&engine, submission(vec![7], 10));
    assert_eq!(finish(&mut stream), (expected, FinishReason::Length));
    assert!(engine.stats().num_slow_steps >= 1);
}

/// Whoever supervises the process has to see that it is of no more use.
#[test]
fn a_step_that_never_returns_loses_the_engine() {
    let limits = limits(20, 1);
    let mut mock = model(&limits);
    mock.faults = vec![(StepId(1), Fault::Hang(Duration::from_secs(2)))];
    let mut config = EngineConfig::new(limits);
    config.step_timeout = Duration::from_millis(20);
    config.step_deadline = Duration::from_millis(150);
    let engine = start_with(config, mock);
    let _stream = submit_one(&engine, submission(vec![1, 2, 3], 6));
    wait_until(|| engine.state() != EngineState::Ready);
    let EngineState::Lost(reason) = engine.state() else {
        panic!("{:?}", engine.state());
    };
    assert!(reason.starts_with("step 1 has not returned"), "{reason}");
    let refused = engine.submit(submission(vec![1], 1));
    assert!(matches!(refused, Err(SubmitError::Lost(_))));
}

#[test]
fn draining_finishes_what_was_taken_and_refuses_the_rest() {
    let limits = limits(200, 1);
    let mut mock = model(&limits);
    mock.cost = Some(CostModel {
        per_step_us: 1000.0,
        per_token_us: 0.0,
        per_attended_kilotoken_us: 0.0,
    });
    let engine = start(limits, mock);
    let streams: Vec<_> = (0..30)
        .map(|i| submit_one(&engine, submission(vec![i], 20)))
        .collect();
    assert!(!engine.wait_idle(Duration::from_millis(1)));
    engine.drain();
    assert_eq!(engine.state(), EngineState::Draining);
    assert_eq!(
        engine.submit(submission(vec![1], 1)).err(),
        Some(SubmitError::Draining)
    );
    assert_at_rest(&engine);
    for mut stream in streams {
        let (tokens, reason) = finish(&mut stream);
        assert_eq!((tokens.len(), reason), (20, FinishReason::Length));
    }
}

#[test]
fn a_full_queue_refuses_all_choices_or_none_and_leaving_makes_room() {
    let mut limits = limits(200, 1);
    limits.max_num_seqs = 2;
    limits.max_queued_requests = 4;
    let mut mock = model(&limits);
    mock.cost = Some(CostModel {
        per_step_us: 5000.0,
        per_token_us: 0.0,
        per_attended_kilotoken_us: 0.0,
    });
    let engine = start(limits, mock);
    let full = |num_choices| {
        let mut submission = submission(vec![1, 2], 100);
        submission.num_choices = num_choices;
        let mut streams = match engine.submit(submission) {
            Ok(streams) => streams,
            Err(SubmitError::QueueFull { limit }) => {
                assert_eq!(limit, 4);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let firsts: Vec<_> = streams.iter_mut().map(|s| s.next_blocking()).collect();
        if firsts.iter().all(|e| *e == Some(StreamEvent::Accepted)) {
            return Some(streams);
        }
        for first in firsts {
            assert_eq!(
                first,
                Some(StreamEvent::Refused(AdmissionError::QueueFull { limit: 4 }))
            );
        }
        None
    };
    assert!(full(5).is_none(), "five can never wait at once");
    let running: Vec<_> = (0..2).map(|_| full(1).expect("free slots")).collect();
    wait_until(|| engine.stats().scheduler.num_running == 2);
    let mut waiting: Vec<_> = (0..3).map(|_| full(1).expect("room to wait")).collect();
    assert!(full(2).is_none(), "one place is left");
    waiting.push(full(1).expect("the last place"));
    assert!(full(1).is_none());
    drop(waiting.pop());
    assert!(full(1).is_some(), "one left the queue");
    drop((running, waiting));
    assert_at_rest(&engine);
    assert!(engine.stats().num_refused > 0);
}

#[test]
fn a_pinned_prefix_outlives_want_of_pages_and_a_reset() {
    let mut limits = limits(32, 2);
    limits.max_pinned_pages = 3;
    let mock = model(&limits);
    let engine = start(limits, mock);
    let prefix: Vec<_> = (0..15).collect();
    assert_eq!(engine.pin_prefix(prefix.clone()), Ok(3));
    for first in 20..26 {
        let prompt = (0..100).map(|i| (first + i) % VOCAB_SIZE as TokenId);
        finish(&mut submit_one(&engine, submission(prompt.collect(), 4)));
    }
    assert!(engine.stats().scheduler.num_evicted_pages > 0);
    wait_until(|| engine.reset_prefix_cache().is_ok());
    let mut stream = submit_one(&engine, submission(prefix, 1));
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
        panic!("no output");
    };
    assert_eq!(output.num_cached_tokens, 12);

    let other = engine.pin_prefix((30..34).collect());
    let too_many = PinError::TooMany {
        num_pages: 1,
        num_pinned: 3,
        limit: 3,
    };
    assert_eq!(other, Err(PinPrefixError::Pin(too_many)));
    let too_long = engine.pin_prefix(vec![1; 200]);
    assert!(matches!(too_long, Err(PinPrefixError::Submit(_))));
}

/// More pages than the channel holds, while the engine does nothing else.
#[test]
fn kv_events_name_what_can_be_reused() {
    const SALT: u64 = 3;
    let limits = SchedulerConfig::new(4000, 1, 4000);
    let mock = model(&limits);
    let engine = start(limits, mock);
    let prompt: Vec<_> = (0..2500).map(|i| i % 47).collect();
    finish(&mut submit_one(&engine, submission(prompt.clone(), 1)));
    let mut replaced = engine.subscribe_kv_events(SALT + 1);
    let mut events = engine.subscribe_kv_events(SALT);
    let last = loop {
        match replaced.next_blocking() {
            Some(event) => drop(event),
            None => break replaced.next_blocking(),
        }
    };
    assert_eq!(last, None);

    assert_eq!(events.next_blocking(), Some(KvEvent::Cleared));
    let root = PageHash::root(SALT, &Namespace::default());
    let mut before = None;
    for &token in &prompt {
        let page = before.unwrap_or(root).next(SALT, &[token]);
        let stored = KvEvent::Stored {
            page,
            parent: before,
            tokens: [token].into(),
        };
        assert_eq!(events.next_blocking(), Some(stored));
        before = Some(page);
    }
    engine.reset_prefix_cache().unwrap();
    for _ in &prompt {
        let event = events.next_blocking();
        assert!(matches!(event, Some(KvEvent::Removed { .. })), "{event:?}");
    }
    assert_eq!(events.try_next(), None);
    engine.shutdown();
    assert_eq!(events.next_blocking(), None);
}

#[test]
fn what_can_never_run_is_refused_in_the_callers_thread() {
    let engine = start(limits(10, 1), model(&limits(10, 1)));
    assert_eq!(
        engine.submit(submission(vec![], 1)).err(),
        Some(SubmitError::Refused(AdmissionError::EmptyPrompt))
    );
    assert!(matches!(
        engine.submit(submission(vec![1; 100], 29)).err(),
        Some(SubmitError::Refused(AdmissionError::ContextExceeded { .. }))
    ));
    assert!(matches!(
        engine.submit(submission(vec![1; 30], 20)).err(),
        Some(SubmitError::Refused(AdmissionError::PoolExceeded { .. }))
    ));
    assert_at_rest(&engine);
}

#[test]
fn shutdown_ends_every_stream() {
    let limits = limits(200, 2);
    let mut mock = model(&limits);
    mock.cost = Some(CostModel {
        per_step_us: 1000.0,
        per_token_us: 0.0,
        per_attended_kilotoken_us: 0.0,
    });
    let engine = start(limits, mock);
    let mut stream = submit_one(&engine, submission(vec![1], 100));
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    engine.shutdown();
    let (_, reason) = read_outputs(&mut stream);
    assert_failed(&reason, "shut down");
    assert!(matches!(
        engine.submit(submission(vec![1], 1)),
        Err(SubmitError::Lost(_))
    ));
}

#[test]
fn a_pool_of_another_size_is_refused_at_start() {
    let mock = model(&limits(20, 1));
    let started = Engine::start(
        EngineConfig::new(limits(10, 1)),
        Box::new(MockExecutor::new(mock)),
    );
    assert!(matches!(started.err(), Some(EngineError::KvLayout { .. })));
}
