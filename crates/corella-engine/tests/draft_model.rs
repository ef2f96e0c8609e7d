//! Guesses of a draft model, right now and then, change no token and cost little when they err.

use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::{
    Batch, BatchOutput, FinishReason, Namespace, PageId, SamplingParams, SchedulerConfig,
    Speculation, StepId, StoppingCriteria, TokenId,
};
use corella_engine::{
    DraftModel, Engine, EngineConfig, EngineError, EngineState, EngineStats, StreamEvent,
    Submission, TokenStream,
};
use corella_model::{
    Executor, ExecutorError, ExecutorInfo, Fault, KvLayout, MockConfig, MockExecutor, TokenMask,
};

const VOCAB_SIZE: usize = 50;
const LONG: Duration = Duration::from_secs(60);

/// The mock, which draws what the model served draws, but says something else as often as it is
/// told to. Reads its pages as strictly as ever.
struct Unsure {
    mock: MockExecutor,
    num_right_in_ten: usize,
    dice: Dice,
}

impl Executor for Unsure {
    fn info(&self) -> ExecutorInfo {
        self.mock.info()
    }

    fn kv_layout(&self) -> KvLayout {
        self.mock.kv_layout()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.mock.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.mock.submit(batch)
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.mock.sample(step, masks)
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let mut output = self.mock.wait()?;
        for (_, sample) in &mut output.samples {
            if self.dice.roll(10) >= self.num_right_in_ten {
                sample.token = (sample.token + 1) % VOCAB_SIZE as TokenId;
            }
        }
        Ok(output)
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<(), ExecutorError> {
        self.mock.read_page(page, out)
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ExecutorError> {
        self.mock.write_page(page, bytes)
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

    fn prompt(&mut self) -> Vec<TokenId> {
        let len = 1 + self.roll(48);
        (0..len).map(|_| self.roll(VOCAB_SIZE) as TokenId).collect()
    }
}

/// A model and the one that guesses for it.
struct Pair {
    limits: SchedulerConfig,
    draft: MockConfig,
    draft_max_model_len: u32,
    draft_budget: u32,
    num_right_in_ten: usize,
}

impl Pair {
    fn new(draw_cost: u32, num_right_in_ten: usize) -> Self {
        let limits = SchedulerConfig {
            max_num_seqs: 16,
            max_num_batched_tokens: 64,
            max_prefill_tokens: 32,
            new_token_ratio: SchedulerConfig::RATIO_ONE / 8,
            max_preemptions: 1000,
            speculation: Speculation::Draft { draw_cost },
            max_draft_tokens: 6,
            ..SchedulerConfig::new(48, 4, 128)
        };
        Self {
            draft: MockConfig::new(VOCAB_SIZE, 16 * 32, 4),
            draft_max_model_len: limits.max_model_len,
            draft_budget: 40,
            limits,
            num_right_in_ten,
        }
    }

    fn model(&self) -> MockConfig {
        MockConfig::new(VOCAB_SIZE, self.limits.num_pages, self.limits.page_size)
    }

    fn start(&self) -> Engine {
        let mut config = EngineConfig::new(self.limits.clone());
        config.step_timeout = Duration::from_millis(50);
        config.step_deadline = Duration::from_millis(500);
        let executor = Box::new(MockExecutor::new(self.model()));
        Engine::start_with_draft_model(config, executor, self.draft_model()).expect("it starts")
    }

    fn draft_model(&self) -> DraftModel {
        DraftModel {
            executor: Box::new(Unsure {
                mock: MockExecutor::new(self.draft.clone()),
                num_right_in_ten: self.num_right_in_ten,
                dice: Dice(1),
            }),
            max_num_batched_tokens: self.draft_budget,
            max_model_len: self.draft_max_model_len,
        }
    }

    fn expected(&self, submission: &Submission) -> Vec<TokenId> {
        let max_tokens = submission.stopping.max_tokens.unwrap();
        self.model().lone_tokens(
            &submission.prompt,
            &submission.sampling,
            max_tokens as usize,
        )
    }

    /// Many requests, some of which leave early, and what the engine says of them.
    fn come_and_go(&self) -> EngineStats {
        let engine = self.start();
        let mut dice = Dice(7);
        for _ in 0..4 {
            let mut readers = Vec::new();
            for _ in 0..48 {
                let mut submission = submission(dice.prompt(), 1 + dice.roll(60) as u32);
                if dice.roll(2) == 0 {
                    submission.sampling.temperature = 1.0;
                    submission.sampling.seed = dice.roll(1000) as u64;
                    submission.sampling.logprobs = Some(2);
                }
                let expected = self.expected(&submission);
                let leaves_after = (dice.roll(4) == 0).then(|| dice.roll(expected.len()));
                let mut stream = submit(&engine, submission);
                readers.push(std::thread::spawn(move || match leaves_after {
                    None => assert_eq!(finish(&mut stream), (expected, FinishReason::Length)),
                    Some(num_tokens) => {
                        for token in &expected[..num_tokens] {
                            assert_eq!(next_token(&mut stream), Some(*token));
                        }
                    }
                }));
            }
            for reader in readers {
                reader.join().expect("the reader's checks hold");
            }
            assert!(engine.wait_idle(LONG));
        }
        let stats = engine.stats();
        assert!(stats.scheduler.num_preemptions > 0, "{stats:?}");
        assert_eq!((stats.num_finished_error, stats.num_failed_steps), (0, 0));
        stats
    }
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

fn submit(engine: &Engine, submission: Submission) -> TokenStream {
    engine.submit(submission).expect("it is taken").remove(0)
}

fn next_token(stream: &mut TokenStream) -> Option<TokenId> {
    loop {
        match stream.next_blocking()? {
            StreamEvent::Accepted => {}
            StreamEvent::Refused(error) => panic!("{error}"),
            StreamEvent::Output(output) => return output.sample.map(|sample| sample.token),
        }
    }
}

fn finish(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = Vec::new();
    while let Some(event) = stream.next_blocking() {
        if let StreamEvent::Output(output) = event {
            tokens.extend(output.sample.map(|sample| sample.token));
            if let Some(reason) = output.finish {
                return (tokens, reason);
            }
        }
    }
    panic!("the stream ended without a terminal event");
}

#[test]
fn drafted_outputs_equal_lone_runs() {
    for num_right_in_ten in [10, 8, 4] {
        let stats = Pair::new(0, num_right_in_ten).come_and_go().scheduler;
        let (drafted, accepted) = (stats.num_draft_tokens, stats.num_accepted_draft_tokens);
        assert!(accepted > 500, "{stats:?}");
        // Seeded draws are guessed as well as greedy ones: only whoever leaves with drafts in
        // flight has no use for them.
        match num_right_in_ten {
            10 => assert!(20 * accepted > 19 * drafted, "{stats:?}"),
            _ => assert!(drafted - accepted > 500, "{stats:?}"),
        }
    }
}

/// Sequences are dropped for others, and who finds no page goes without.
#[test]
fn a_small_draft_pool_costs_drafts_only() {
    let ample = Pair::new(0, 8).come_and_go().scheduler.num_draft_tokens;
    for num_pages in [1, 12] {
        let mut pair = Pair::new(0, 8);
        pair.draft = MockConfig::new(VOCAB_SIZE, num_pages, 4);
        let num_drafts = pair.come_and_go().scheduler.num_draft_tokens;
        assert!(num_drafts < ample, "{num_drafts} of {ample}");
        assert!(num_drafts > 0 || num_pages == 1, "{num_pages} pages");
    }
}

/// Prompts take several rounds, of another page size than the model's.
#[test]
fn a_small_draft_budget_changes_nothing() {
    let mut pair = Pair::new(0, 9);
    pair.draft_budget = 16;
    pair.draft = MockConfig::new(VOCAB_SIZE, 16 * 19, 7);
    let stats = pair.come_and_go().scheduler;
    assert!(stats.num_accepted_draft_tokens > 500, "{stats:?}");
}

#[test]
fn a_model_that_always_errs_is_asked_now_and_then() {
    let mut pair = Pair::new(25, 0);
    pair.limits.max_model_len = 1010;
    pair.limits.num_pages = 256;
    pair.draft = MockConfig::new(VOCAB_SIZE, 256, 4);
    pair.draft_max_model_len = 1010;
    let engine = pair.start();
    let submission = submission(vec![1, 2, 3], 1000);
    let expected = pair.expected(&submission);
    assert_eq!(finish(&mut submit(&engine, submission)).0, expected);
    // Half a step each: eight until sixteen rows' worth is lost, and two more after 16, 32, 64,
    // 128 and 256 steps.
    assert_eq!(engine.stats().scheduler.num_draft_tokens, 8 + 5 * 2);
}

#[test]
fn drafts_end_where_the_draft_models_context_ends() {
    let mut pair = Pair::new(0, 10);
    pair.draft_max_model_len = 40;
    let engine = pair.start();
    let submission = submission((0..10).collect(), 100);
    let expected = pair.expected(&submission);
    assert_eq!(finish(&mut submit(&engine, submission)).0, expected);
    let stats = engine.stats().scheduler;
    // Its last draft stands right behind its context.
    assert_eq!(stats.num_draft_tokens, stats.num_accepted_draft_tokens);
    assert!((20..=31).contains(&stats.num_draft_tokens), "{stats:?}");
}

#[test]
fn a_draft_model_that_fails_is_let_go_and_no_request_notices() {
    for fault in [Fault::Fail, Fault::Panic, Fault::Lost, Fault::Undrawn] {
        let mut pair = Pair::new(0, 10);
        pair.draft.faults = vec![(StepId(9), fault)];
        let engine = pair.start();
        let submission = submission(vec![3, 1, 4, 1, 5], 60);
        let expected = (pair.expected(&submission), FinishReason::Length);
        for _ in 0..2 {
            assert_eq!(finish(&mut submit(&engine, submission.clone())), expected);
        }
        let stats = engine.stats();
        assert_eq!((stats.num_failed_steps, stats.num_finished_error), (0, 0));
        assert_eq!(engine.state(), EngineState::Ready);
        // Rounds of 2, 4 and 6 drafts, a step each: the third is lost. Who cannot be drawn for goes
        // without from then on, and the next request does not.
        let num_drafts = stats.scheduler.num_draft_tokens;
        match fault {
            Fault::Undrawn => assert!(num_drafts > 40, "{num_drafts}"),
            _ => assert_eq!(num_drafts, 2 + 4, "{fault:?}"),
        }
    }
}

/// The loop waits for it and can do nothing else.
#[test]
fn a_draft_step_that_never_returns_loses_the_engine() {
    let mut pair = Pair::new(0, 10);
    pair.draft.faults = vec![(StepId(2), Fault::Hang(Duration::from_secs(3)))];
    let engine = pair.start();
    let _stream = submit(&engine, submission(vec![3, 1, 4], 60));
    let deadline = Instant::now() + LONG;
    let reason = loop {
        assert!(Instant::now() < deadline);
        if let EngineState::Lost(reason) = engine.state() {
            break reason;
        }
        std::thread::yield_now();
    };
    assert!(reason.contains("step of the draft model 2"), "{reason}");
}

#[test]
fn speculation_and_draft_model_need_each_other() {
    let mut pair = Pair::new(0, 10);
    let executor = || Box::new(MockExecutor::new(pair.model()));
    let alone = Engine::start(EngineConfig::new(pair.limits.clone()), executor());
    assert!(matches!(alone, Err(EngineError::Config(_))));
    let executor = executor();
    pair.limits.speculation = Speculation::Off;
    let config = EngineConfig::new(pair.limits.clone());
    let unasked = Engine::start_with_draft_model(config, executor, pair.draft_model());
    assert!(matches!(unasked, Err(EngineError::Config(_))));
}
