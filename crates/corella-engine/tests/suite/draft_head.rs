//! The served model's own draft head: its requests, its guesses, and its failures.

use std::sync::Arc;

use corella_core::{
    Batch, BatchOutput, FinishReason, Sample, SchedulerConfig, SlotId, Speculation, StepId, TokenId,
};
use corella_engine::{Engine, EngineConfig, EngineState};
use corella_model::{
    DraftSlot, Executor, ExecutorError, ExecutorInfo, KvLayout, KvPages, MockConfig, MockExecutor,
    StepWaker, TokenMask,
};

use crate::fixture::{VOCAB_SIZE, finish, submission, submit_one};

type Guesses = Result<Vec<(SlotId, Vec<Sample>)>, String>;

/// The mock executor with a draft head.
struct WithHead<F> {
    mock: MockExecutor,
    guess: F,
}

impl<F: FnMut(&[DraftSlot]) -> Guesses + Send> Executor for WithHead<F> {
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
        self.mock.wait()
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.mock.try_wait()
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.mock.set_waker(waker);
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        self.mock.kv_pages()
    }

    fn has_draft_head(&self) -> bool {
        true
    }

    fn draft(&mut self, asked: &[DraftSlot]) -> Guesses {
        (self.guess)(asked)
    }
}

/// The result of the third round.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Third {
    Guesses,
    Fails,
    Panics,
}

/// The head is asked for the tokens after a request's newest token, and guesses right until it fails.
#[test]
fn a_head_that_fails_is_let_go_and_no_request_notices() {
    for third in [Third::Guesses, Third::Fails, Third::Panics] {
        let limits = SchedulerConfig {
            speculation: Speculation::Draft { draw_cost: 0 },
            max_draft_tokens: 6,
            ..SchedulerConfig::new(48, 4, 128)
        };
        let config = MockConfig::new(VOCAB_SIZE, limits.num_pages, limits.page_size);
        let submission = submission(vec![3, 1, 4, 1, 5], 60);
        let tokens = config.lone_tokens(&submission.prompt, &submission.sampling, 60);
        let text: Vec<TokenId> = [&submission.prompt[..], &tokens].concat();
        let mut round = 0;
        let guess = move |asked: &[DraftSlot]| -> Guesses {
            round += 1;
            match third {
                Third::Fails if round == 3 => return Err("it has no mood".to_owned()),
                Third::Panics if round == 3 => panic!("it has no mood"),
                _ => {}
            }
            let guess = |slot: &DraftSlot| {
                let position = slot.position as usize;
                assert_eq!(slot.token, text[position]);
                let coming = text[position + 1..].iter().take(slot.max_drafts as usize);
                let samples = coming.map(|&token| Sample {
                    token,
                    logprobs: None,
                });
                (slot.slot, samples.collect())
            };
            Ok(asked.iter().map(guess).collect())
        };
        let mock = MockExecutor::new(config);
        let executor = Box::new(WithHead { mock, guess });
        let engine = Engine::start(EngineConfig::new(limits), executor).unwrap();
        let finished = finish(&mut submit_one(&engine, submission));
        assert_eq!(finished, (tokens, FinishReason::Length), "{third:?}");
        assert_eq!(engine.state(), EngineState::Ready);
        let stats = engine.stats().scheduler;
        let (drafted, accepted) = (stats.num_draft_tokens, stats.num_accepted_draft_tokens);
        assert_eq!(accepted, drafted, "{stats:?}");
        match third {
            Third::Guesses => assert!(drafted > 40, "{stats:?}"),
            // The first two rounds have 2 and 4 guesses.
            Third::Fails | Third::Panics => assert_eq!(drafted, 2 + 4, "{third:?}"),
        }
    }
}
