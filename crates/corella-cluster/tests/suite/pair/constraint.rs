//! Constrained answers of a pair.

use std::sync::Arc;

use corella_core::{FinishReason, SamplingParams, TokenId};
use corella_engine::{Allowed, ConstrainedAnswer, ConstraintMaker, TokenConstraint};
use corella_model::CostModel;
use corella_test::wait_until_async;

use crate::pair::fixture::*;

const HAS_NO_SOURCE: u32 = 1000;
const HAS_BAD_SOURCE: u32 = 1001;

/// This many even tokens, and nothing after them.
#[derive(Debug)]
pub struct EvenTokens {
    pub num_even: u32,
}

struct EvenAnswer {
    num_left: u32,
}

/// Reads the source of `EvenTokens`.
pub struct EvenMaker;

impl ConstraintMaker for EvenMaker {
    fn make(&self, source: &str) -> Result<Arc<dyn TokenConstraint>, String> {
        let num_even = source
            .parse()
            .map_err(|_| format!("not a number: {source}"))?;
        Ok(Arc::new(EvenTokens { num_even }))
    }
}

impl TokenConstraint for EvenTokens {
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String> {
        let num_left = self.num_even;
        Ok(Box::new(EvenAnswer { num_left }))
    }

    fn source(&self) -> Option<Arc<str>> {
        match self.num_even {
            HAS_NO_SOURCE => None,
            HAS_BAD_SOURCE => Some("nonsense".into()),
            num_even => Some(num_even.to_string().into()),
        }
    }
}

impl ConstrainedAnswer for EvenAnswer {
    fn push(&mut self, token: TokenId) -> Result<(), String> {
        match self
            .num_left
            .checked_sub(1)
            .filter(|_| token.is_multiple_of(2))
        {
            Some(num_left) => self.num_left = num_left,
            None => return Err(format!("{token} is not allowed")),
        }
        Ok(())
    }

    fn allowed(&mut self) -> Result<Allowed, String> {
        let may_end = self.num_left == 0;
        let word = if may_end { 0 } else { 0x5555_5555 };
        Ok(Allowed {
            tokens: Box::new([word; 2]),
            may_end,
        })
    }
}

fn seeded(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed,
        ..SamplingParams::GREEDY
    }
}

/// The decode node compiles the session's constraint and continues after the first token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constrained_answer_is_that_of_one_node() {
    let model = model(256);
    let decode = Decode::start(&model, 12).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let prompt: Vec<TokenId> = (0..30).collect();
    for num_even in [1, 2, 8] {
        for (at, sampling) in [SamplingParams::GREEDY, seeded(5)].into_iter().enumerate() {
            let mut asked = submission(prompt.clone(), 12, sampling.clone());
            asked.constraint = Some(Arc::new(EvenTokens { num_even }));
            asked.num_choices = 2;
            let streams = prefill.submit(asked);
            for (choice, stream) in streams.into_iter().enumerate() {
                let sampling = SamplingParams {
                    choice: choice as u32,
                    ..sampling.clone()
                };
                let answer = finish(stream).await;
                let tokens = model.lone_masked_tokens(&prompt, &sampling, |output| {
                    (output.len() < num_even as usize).then(|| [0x5555_5555; 2].into())
                });
                assert_eq!(tokens.len(), num_even as usize);
                assert_eq!(answer, (tokens, FinishReason::EndToken), "{num_even}, {at}");
            }
        }
    }
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    let there = decode.engine.stats().scheduler;
    assert_eq!(there.num_prefix_query_tokens, 0, "it computes no prompt");
    // The first token of each answer comes from the prefill node.
    assert_eq!(there.num_generated_tokens, 4 * (1 + 7));
}

/// If a decode node cannot read a constraint, the prefill node decodes the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constraint_that_cannot_travel_stays_on_its_node() {
    let model = model(256);
    let decode = Decode::start(&model, 12).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let prompt: Vec<TokenId> = (0..30).collect();
    // The first constraint has no source, and the decode node cannot read the second one's.
    for num_even in [HAS_NO_SOURCE, HAS_BAD_SOURCE] {
        let mut asked = submission(prompt.clone(), 4, SamplingParams::GREEDY);
        asked.constraint = Some(Arc::new(EvenTokens { num_even }));
        let answer = finish(prefill.submit(asked).remove(0)).await;
        let mut tokens = model.lone_masked_tokens(&prompt, &SamplingParams::GREEDY, |output| {
            (output.len() < 4).then(|| [0x5555_5555; 2].into())
        });
        tokens.truncate(4);
        assert_eq!(answer, (tokens, FinishReason::Length));
    }
    at_rest(&prefill.engine).await;
    assert_eq!(decode.engine.stats().scheduler.num_steps, 0);
}

/// The decode node is lost in the middle. The prefill node continues after the last token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constrained_answer_goes_on_where_it_was_lost() {
    let mut slow = model(256);
    slow.cost = Some(CostModel::per_step(5000.0));
    let decode = Decode::start(&slow, 12).await;
    let prefill = Prefill::start(&model(256), &[&decode]);
    let prompt: Vec<TokenId> = (0..30).collect();
    let mut asked = submission(prompt.clone(), 60, SamplingParams::GREEDY);
    asked.constraint = Some(Arc::new(EvenTokens { num_even: 40 }));
    let stream = prefill.submit(asked).remove(0);
    let answer = tokio::spawn(finish(stream));
    wait_until_async("the decode node has drawn some", || {
        decode.engine.stats().scheduler.num_generated_tokens > 3
    })
    .await;
    decode.engine.shutdown();
    decode.kill();
    let tokens = slow.lone_masked_tokens(&prompt, &SamplingParams::GREEDY, |output| {
        (output.len() < 40).then(|| [0x5555_5555; 2].into())
    });
    let answer = answer.await.expect("no task panics");
    assert_eq!(answer, (tokens, FinishReason::EndToken));
    at_rest(&prefill.engine).await;
}
