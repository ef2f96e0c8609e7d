//! Tokens of a pair equal those of the lone run.

use std::future::poll_fn;
use std::sync::Arc;

use corella_core::{FinishReason, Pooling, SamplingParams, TokenId, TokenRules};
use corella_engine::StreamEvent;
use corella_model::MockConfig;

use crate::pair::fixture::*;

/// Draws the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        // A linear congruential generator, by Knuth's constants.
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

fn sampling(numbers: &mut Numbers) -> SamplingParams {
    match numbers.below(4) {
        0 => SamplingParams::GREEDY,
        // Rules matter for the tokens of both nodes: the prefill node draws the first one.
        3 => SamplingParams {
            rules: Some(Arc::new(
                TokenRules::new()
                    .with_allowed((0..50).filter(|token| token % 5 != 2).collect())
                    .with_banned(
                        (0..50)
                            .flat_map(|a| [vec![a, a], vec![a, 49 - a]])
                            .collect(),
                    )
                    .with_bias((0..50).map(|token| (token, (token % 3) as f32)).collect()),
            )),
            temperature: 1.0,
            seed: numbers.below(1000),
            ..SamplingParams::GREEDY
        },
        1 => SamplingParams {
            temperature: 1.0,
            seed: numbers.below(1000),
            ..SamplingParams::GREEDY
        },
        _ => SamplingParams {
            temperature: 0.8,
            presence_penalty: 0.5,
            repetition_penalty: 1.2,
            seed: numbers.below(1000),
            ..SamplingParams::GREEDY
        },
    }
}

/// Prompts share beginnings, so that both nodes find prefixes.
fn prompt(numbers: &mut Numbers) -> Vec<TokenId> {
    let shared = numbers.below(4) * 8;
    let own = 1 + numbers.below(40);
    let shared = (0..shared).map(|i| (i % 7) as TokenId);
    let own: Vec<_> = (0..own).map(|_| numbers.below(50) as TokenId).collect();
    shared.chain(own).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outputs_of_a_pair_equal_those_of_lone_runs() {
    // Exports may hold half of the pages, and ten prompts fit in that half: on a busy machine all of them wait for
    // their transfers at once.
    for model in [model(512), windowed_model(512)] {
        compare_with_lone_runs(model).await;
    }
}

async fn compare_with_lone_runs(model: MockConfig) {
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let mut numbers = Numbers(1);
    for _ in 0..20 {
        let mut answers = Vec::new();
        for _ in 0..10 {
            let prompt = prompt(&mut numbers);
            let sampling = sampling(&mut numbers);
            let num_tokens = 1 + numbers.below(20);
            let expected = model.lone_tokens(&prompt, &sampling, num_tokens as usize);
            let submission = submission(prompt, num_tokens as u32, sampling);
            let stream = prefill.submit(submission).remove(0);
            answers.push((tokio::spawn(finish(stream)), expected));
        }
        for (answer, expected) in answers {
            let (tokens, reason) = answer.await.expect("no task panics");
            assert_eq!((tokens, reason), (expected, FinishReason::Length));
        }
    }
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    assert_eq!(prefill.node.stats().num_sessions, 0);
    assert_eq!(decode.node.num_sessions(), 0);
    let there = decode.engine.stats().scheduler;
    let here = prefill.engine.stats().scheduler;
    assert!(
        there.num_generated_tokens > 1000,
        "most tokens come from the decode node"
    );
    assert_eq!(
        there.num_prefix_query_tokens, 0,
        "and it computes no prompt"
    );
    assert!(
        here.num_generated_tokens <= 200,
        "the prefill node draws one token a request"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_and_stop_tokens_are_as_on_one_node() {
    let model = model(256);
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let sampling = SamplingParams {
        temperature: 1.0,
        seed: 5,
        ..SamplingParams::GREEDY
    };
    let prompt: Vec<TokenId> = (0..30).collect();
    let mut asked = submission(prompt.clone(), 12, sampling.clone());
    asked.num_choices = 4;
    for (choice, stream) in prefill.submit(asked).into_iter().enumerate() {
        let sampling = SamplingParams {
            choice: choice as u32,
            ..sampling.clone()
        };
        let expected = model.lone_tokens(&prompt, &sampling, 12);
        assert_eq!(finish(stream).await, (expected, FinishReason::Length));
    }

    // A stop token in the middle, and one as the first token.
    let lone = model.lone_tokens(&prompt, &sampling, 12);
    for at in [0, 5] {
        let first = lone
            .iter()
            .position(|token| *token == lone[at])
            .expect("it is there");
        let mut asked = submission(prompt.clone(), 12, sampling.clone());
        asked.stopping.stop_token_ids = vec![lone[at]];
        let stream = prefill.submit(asked).remove(0);
        let expected = lone[..=first].to_vec();
        assert_eq!(finish(stream).await, (expected, FinishReason::StopToken));
    }
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
}

/// 202 rows are 51 pages. Every choice but the first is sent only the last page, whose rows it continues to fill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_of_one_prompt_share_one_transfer() {
    let model = model(512);
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let sampling = SamplingParams {
        temperature: 1.0,
        seed: 6,
        ..SamplingParams::GREEDY
    };
    let mut num_bytes = Vec::new();
    for num_choices in [1, 4] {
        let before = prefill.node.stats().num_bytes_sent;
        let prompt: Vec<_> = (0..202).map(|i| (i * num_choices + i / 7) % 50).collect();
        let mut asked = submission(prompt.clone(), 12, sampling.clone());
        asked.num_choices = num_choices;
        let answers = prefill.submit(asked).into_iter();
        let answers: Vec<_> = answers.map(|stream| tokio::spawn(finish(stream))).collect();
        for (choice, answer) in answers.into_iter().enumerate() {
            let sampling = SamplingParams {
                choice: choice as u32,
                ..sampling.clone()
            };
            let expected = model.lone_tokens(&prompt, &sampling, 12);
            let answer = answer.await.expect("no task panics");
            assert_eq!(answer, (expected, FinishReason::Length));
        }
        num_bytes.push(prefill.node.stats().num_bytes_sent - before);
    }
    // A page of a layer has 64 bytes, and there are three layers.
    let page = 64 * 3;
    assert_eq!(num_bytes, [51 * page, (51 + 3) * page]);
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    assert_eq!(decode.node.num_sessions(), 0);
    let there = decode.engine.stats().scheduler;
    assert_eq!(there.num_prefix_query_tokens, 0, "it computes no prompt");
}

/// Only the node that computes a prompt has its log-probabilities.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_scored_stays_on_its_node() {
    let model = model(256);
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let prompt: Vec<TokenId> = (0..30).collect();
    let sampling = SamplingParams {
        prompt_logprobs: Some(3),
        ..SamplingParams::GREEDY
    };
    for max_tokens in [0, 12] {
        let asked = submission(prompt.clone(), max_tokens, sampling.clone());
        let answer = finish_scored(prefill.submit(asked).remove(0)).await;
        let tokens = model.lone_tokens(&prompt, &sampling, max_tokens as usize);
        let scored = model.lone_prompt_logprobs(&prompt, 3);
        assert_eq!(answer, (tokens, FinishReason::Length, scored));
    }
    at_rest(&prefill.engine).await;
    assert_eq!(decode.engine.stats().scheduler.num_steps, 0);
}

/// Only the node that computes a prompt has its hidden state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_pooled_stays_on_its_node() {
    let model = model(256);
    let decode = Decode::start(&model, 12).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let prompt: Vec<TokenId> = (0..30).collect();
    for pooling in [Pooling::LastToken, Pooling::Mean] {
        let sampling = SamplingParams {
            pooling: Some(pooling),
            ..SamplingParams::GREEDY
        };
        let mut stream = prefill
            .submit(submission(prompt.clone(), 12, sampling))
            .remove(0);
        let mut state = None;
        while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
            if let StreamEvent::Output(output) = event {
                assert!(output.finish.is_none_or(|end| end == FinishReason::Length));
                state = state.or(output.hidden_state);
            }
        }
        assert_eq!(state, Some(model.lone_hidden_state(&prompt, pooling)));
    }
    at_rest(&prefill.engine).await;
    assert_eq!(decode.engine.stats().scheduler.num_steps, 0);
}
