//! Random requests from a seed.

use std::sync::Arc;

use corella_core::{FinishReason, SamplingParams, TokenId, TokenRules};
use corella_engine::{Engine, EngineStats, StreamEvent};
use corella_model::MockConfig;

use crate::fixture::{VOCAB_SIZE, assert_at_rest, finish, submission, submit_one, submit_together};

/// Checks that every request gets the tokens of its lone run, while many others arrive, leave or
/// are preempted. `model` is the engine's model, with the same gate.
pub fn requests_come_and_go(engine: &Engine, model: &MockConfig, mut dice: Dice) -> EngineStats {
    for round in 0..6 {
        // A reader that leaves before the first step.
        model.gate.close();
        drop(submit_one(engine, submission(vec![1, 2, 3], 20)));
        let (mut submissions, mut checks) = (Vec::new(), Vec::new());
        for _ in 0..64 {
            let mut submission = submission(dice.prompt(), 1 + dice.roll(60) as u32);
            submission.sampling = dice.sampling();
            let expected = model.lone_tokens(
                &submission.prompt,
                &submission.sampling,
                submission.stopping.max_tokens.unwrap() as usize,
            );
            // Some readers leave, at once or after a few tokens.
            let leaves_after = (dice.roll(4) == 0).then(|| dice.roll(expected.len() + 1));
            submissions.push(submission);
            checks.push((expected, leaves_after));
        }
        let streams = submit_together(engine, &model.gate, submissions);
        let mut readers = Vec::new();
        for (mut stream, (expected, leaves_after)) in streams.into_iter().zip(checks) {
            readers.push(std::thread::spawn(move || match leaves_after {
                None => assert_eq!(finish(&mut stream), (expected, FinishReason::Length)),
                Some(0) => {}
                Some(num_tokens) => {
                    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
                    for token in &expected[..num_tokens] {
                        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
                            panic!("the stream has no output");
                        };
                        assert_eq!(output.sample.unwrap().token, *token, "round {round}");
                    }
                }
            }));
        }
        for reader in readers {
            reader.join().expect("a reader's check failed");
        }
        assert_at_rest(engine);
    }
    let stats = engine.stats();
    assert!(stats.scheduler.num_preemptions > 0, "{stats:?}");
    assert!(stats.scheduler.num_evicted_pages > 0, "{stats:?}");
    assert!(stats.num_finished_abort >= 6, "{stats:?}");
    assert_eq!(stats.num_finished_error, 0);
    assert_eq!(stats.num_failed_steps, 0);
    engine
        .reset_prefix_cache()
        .expect("requests still hold pages");
    assert_eq!(engine.submit(submission(vec![1], 1)).unwrap().len(), 1);
    assert_at_rest(engine);
    stats
}

/// A small random generator: equal seeds give equal tests.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % sides as u64) as usize
    }

    /// A prompt that often begins like others, so that prefixes are shared.
    pub fn prompt(&mut self) -> Vec<TokenId> {
        let shared = self.roll(24);
        let own = 1 + self.roll(24);
        let family = self.roll(3) as TokenId;
        (0..shared)
            .map(|i| (i as TokenId * 7 + family) % VOCAB_SIZE as TokenId)
            .chain((0..own).map(|_| self.roll(VOCAB_SIZE) as TokenId))
            .collect()
    }

    pub fn sampling(&mut self) -> SamplingParams {
        let mut sampling = SamplingParams::GREEDY;
        if self.roll(2) == 0 {
            sampling.temperature = 1.0;
            sampling.seed = self.roll(1000) as u64;
            sampling.logprobs = Some(2);
            if sampling.seed.is_multiple_of(3) {
                let vocabulary = 0..VOCAB_SIZE as TokenId;
                let rules = TokenRules::new()
                    .with_banned(vocabulary.clone().map(|token| vec![token, token]).collect())
                    .with_bias(
                        vocabulary
                            .map(|token| (token, (token % 2) as f32))
                            .collect(),
                    );
                sampling.rules = Some(Arc::new(rules));
            }
        }
        sampling
    }
}
