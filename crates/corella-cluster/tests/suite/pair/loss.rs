//! Nodes that are missing, leave or have no room, and clients that leave.

use std::future::poll_fn;

use corella_core::{FinishReason, SamplingParams, TokenId};
use corella_engine::StreamEvent;

use crate::pair::fixture::*;

fn prompt(first: TokenId) -> Vec<TokenId> {
    (0..30).map(|i| (first + i) % 50).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_decode_node_requests_are_served_here() {
    let model = model(128);
    let decode = Decode::start(&model, 11).await;
    decode.kill();
    for prefill in [
        Prefill::start(&model, &[]),
        Prefill::start(&model, &[&decode]),
    ] {
        let expected = model.lone_tokens(&prompt(1), &SamplingParams::GREEDY, 9);
        let asked = submission(prompt(1), 9, SamplingParams::GREEDY);
        let stream = prefill.submit(asked).remove(0);
        assert_eq!(finish(stream).await, (expected, FinishReason::Length));
        at_rest(&prefill.engine).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_that_goes_in_the_middle_leaves_no_gap() {
    let mut slow = model(128);
    slow.cost = Some(corella_model::CostModel::per_step(5000.0));
    let decode = Decode::start(&slow, 11).await;
    let prefill = Prefill::start(&model(128), &[&decode]);
    let expected = slow.lone_tokens(&prompt(1), &SamplingParams::GREEDY, 60);
    let asked = submission(prompt(1), 60, SamplingParams::GREEDY);
    let mut stream = prefill.submit(asked).remove(0);
    let mut tokens = Vec::new();
    while tokens.len() < 10 {
        match poll_fn(|cx| stream.poll_next(cx)).await {
            Some(StreamEvent::Output(output)) => {
                tokens.extend(output.sample.map(|sample| sample.token));
            }
            Some(StreamEvent::Accepted) => {}
            event => panic!("{event:?}"),
        }
    }
    decode.engine.shutdown();
    decode.kill();
    while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
        let StreamEvent::Output(output) = event else {
            panic!("{event:?}");
        };
        tokens.extend(output.sample.map(|sample| sample.token));
        assert!(
            matches!(output.finish, None | Some(FinishReason::Length)),
            "{:?}",
            output.finish
        );
    }
    assert_eq!(tokens, expected);
    at_rest(&prefill.engine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_takes_everything_with_it() {
    let mut slow = model(128);
    slow.cost = Some(corella_model::CostModel::per_step(2000.0));
    let decode = Decode::start(&slow, 11).await;
    let prefill = Prefill::start(&slow, &[&decode]);
    for num_events in 0..8 {
        let asked = submission(prompt(num_events), 60, SamplingParams::GREEDY);
        let mut stream = prefill.submit(asked).remove(0);
        for _ in 0..num_events {
            poll_fn(|cx| stream.poll_next(cx)).await;
        }
        drop(stream);
        at_rest(&prefill.engine).await;
        at_rest(&decode.engine).await;
    }
    assert_eq!(prefill.node.stats().num_sessions, 0);
    assert_eq!(decode.node.num_sessions(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_without_room_hands_over_to_the_next_or_to_this_node() {
    let small = model(8);
    let large = model(256);
    let full = Decode::start(&small, 11).await;
    let free = Decode::start(&large, 12).await;
    let prefill = Prefill::start(&large, &[&full, &free]);
    for first in 0..6 {
        let prompt: Vec<TokenId> = (0..60).map(|i| (first + i) % 50).collect();
        let expected = large.lone_tokens(&prompt, &SamplingParams::GREEDY, 9);
        let asked = submission(prompt, 9, SamplingParams::GREEDY);
        let stream = prefill.submit(asked).remove(0);
        assert_eq!(finish(stream).await, (expected, FinishReason::Length));
    }
    assert_eq!(full.engine.stats().scheduler.num_steps, 0);
    assert!(free.engine.stats().scheduler.num_steps > 0);

    let alone = Prefill::start(&large, &[&full]);
    let prompt: Vec<TokenId> = (0..60).collect::<Vec<_>>().iter().map(|i| i % 50).collect();
    let expected = large.lone_tokens(&prompt, &SamplingParams::GREEDY, 9);
    let stream = alone
        .submit(submission(prompt, 9, SamplingParams::GREEDY))
        .remove(0);
    assert_eq!(finish(stream).await, (expected, FinishReason::Length));
    for engine in [&prefill.engine, &alone.engine, &full.engine, &free.engine] {
        at_rest(engine).await;
    }
}
