//! Drafts of a draft model change no token at any hit rate, and cost little when they are wrong.

use std::time::Duration;

use corella_core::{
    BatchOutput, FinishReason, SchedulerConfig, SchedulerStats, Speculation, StepId, TokenId,
};
use corella_engine::{DraftModel, Engine, EngineConfig, EngineError, EngineState, Submission};
use corella_model::{Fault, MockConfig, MockExecutor, StepGate};

use crate::fixture::{Altered, VOCAB_SIZE, assert_lost, finish, submission, submit_one};
use crate::load::{Dice, requests_come_and_go};

#[test]
fn drafted_outputs_equal_lone_runs() {
    for num_right_in_ten in [10, 8, 4] {
        let stats = Pair::new(0, num_right_in_ten).come_and_go();
        let (drafted, accepted) = (stats.num_draft_tokens, stats.num_accepted_draft_tokens);
        assert!(accepted > 500, "{stats:?}");
        // Seeded draws are guessed as well as greedy ones, so drafts are lost only when a request
        // leaves with some in flight.
        match num_right_in_ten {
            10 => assert!(20 * accepted > 19 * drafted, "{stats:?}"),
            _ => assert!(drafted - accepted > 500, "{stats:?}"),
        }
    }
}

/// Sequences are dropped for others, and a request without a page gets no drafts.
#[test]
fn a_small_draft_pool_costs_drafts_only() {
    let ample = Pair::new(0, 8).come_and_go().num_draft_tokens;
    for num_pages in [1, 12] {
        let mut pair = Pair::new(0, 8);
        pair.draft = MockConfig::new(VOCAB_SIZE, num_pages, 4);
        let num_drafts = pair.come_and_go().num_draft_tokens;
        assert!(num_drafts < ample, "{num_drafts} of {ample}");
        assert!(num_drafts > 0 || num_pages == 1, "{num_pages} pages");
    }
}

/// Prompts take several rounds, and the draft model has another page size than the served model.
#[test]
fn a_small_draft_budget_changes_nothing() {
    let mut pair = Pair::new(0, 9);
    pair.draft_budget = 16;
    pair.draft = MockConfig::new(VOCAB_SIZE, 16 * 19, 7);
    let stats = pair.come_and_go();
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
    assert_eq!(finish(&mut submit_one(&engine, submission)).0, expected);
    // Drawing a draft costs a quarter of a step, and checking it another quarter. Eight wrong drafts cost as much as
    // sixteen rows, and then drafts pause. Two more drafts follow each pause of 16, 32, 64, 128 and 256 steps.
    assert_eq!(engine.stats().scheduler.num_draft_tokens, 8 + 5 * 2);
}

#[test]
fn drafts_end_where_the_draft_models_context_ends() {
    let mut pair = Pair::new(0, 10);
    pair.draft_max_model_len = 40;
    let engine = pair.start();
    let submission = submission((0..10).collect(), 100);
    let expected = pair.expected(&submission);
    assert_eq!(finish(&mut submit_one(&engine, submission)).0, expected);
    let stats = engine.stats().scheduler;
    // The last draft is the token right after the draft model's context.
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
            assert_eq!(
                finish(&mut submit_one(&engine, submission.clone())),
                expected
            );
        }
        let stats = engine.stats();
        assert_eq!((stats.num_failed_steps, stats.num_finished_error), (0, 0));
        assert_eq!(engine.state(), EngineState::Ready);
        // The rounds have 2, 4 and 6 drafts, a step each, and the third fails. A request for which
        // no token can be drawn gets no more drafts from then on, but the next request does.
        let num_drafts = stats.scheduler.num_draft_tokens;
        match fault {
            Fault::Undrawn => assert!(num_drafts > 40, "{num_drafts}"),
            _ => assert_eq!(num_drafts, 2 + 4, "{fault:?}"),
        }
    }
}

/// The loop waits for the draft step and is blocked.
#[test]
fn a_draft_step_that_never_returns_loses_the_engine() {
    let pair = Pair::new(0, 10);
    pair.draft.gate.close();
    pair.draft.gate.let_through(2);
    let mut config = EngineConfig::new(pair.limits.clone());
    config.step_timeout = Duration::from_millis(50);
    config.step_deadline = Duration::from_secs(1);
    let engine = pair.start_with(config);
    let _stream = submit_one(&engine, submission(vec![3, 1, 4], 60));
    let reason = assert_lost(&engine);
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

/// A served model and its draft model, which draws the same tokens but alters some of them at a
/// given rate.
struct Pair {
    limits: SchedulerConfig,
    gate: StepGate,
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
            gate: StepGate::default(),
            num_right_in_ten,
        }
    }

    fn model(&self) -> MockConfig {
        MockConfig {
            gate: self.gate.clone(),
            ..MockConfig::new(VOCAB_SIZE, self.limits.num_pages, self.limits.page_size)
        }
    }

    fn start(&self) -> Engine {
        self.start_with(EngineConfig::new(self.limits.clone()))
    }

    fn start_with(&self, config: EngineConfig) -> Engine {
        let executor = Box::new(MockExecutor::new(self.model()));
        Engine::start_with_draft_model(config, executor, self.draft_model())
            .expect("the engine did not start")
    }

    fn draft_model(&self) -> DraftModel {
        let num_right_in_ten = self.num_right_in_ten;
        let mut dice = Dice(1);
        let executor = Altered {
            mock: MockExecutor::new(self.draft.clone()),
            alter: move |output: &mut BatchOutput| {
                for (_, sample) in &mut output.samples {
                    if dice.roll(10) >= num_right_in_ten {
                        sample.token = (sample.token + 1) % VOCAB_SIZE as TokenId;
                    }
                }
            },
        };
        DraftModel {
            executor: Box::new(executor),
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

    fn come_and_go(&self) -> SchedulerStats {
        requests_come_and_go(&self.start(), &self.model(), Dice(7)).scheduler
    }
}
