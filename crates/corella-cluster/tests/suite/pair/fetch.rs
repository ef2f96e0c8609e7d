//! Nodes that load each other's cached blocks. The mock executor notices every wrong row of a page.

use std::sync::Arc;
use std::time::Duration;

use corella_cluster::blocks::FetchConfig;
use corella_cluster::kv_connector::FetchOutcome;
use corella_core::{SamplingParams, TokenId};

use crate::pair::blocks::{FETCHES, Way};
use crate::pair::fetch_node::*;
use crate::pair::fixture::*;

/// Returns pseudo-random numbers.
fn draw(state: &mut u64, end: u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1);
    (*state >> 33) % end
}

/// The second turn of a conversation goes to another node, which computes only the new tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_turn_brings_its_blocks_from_the_node_of_the_last() {
    for way in [Way::Tcp, Way::Shm] {
        for model in [model(256), windowed_model(256)] {
            let (first, second) = (Node::start(&model, 7, way), Node::start(&model, 11, way));
            let prompt: Vec<TokenId> = (0..33).map(|i| i * i % 50).collect();
            let turn = submission(prompt.clone(), 12, seeded(1));
            let answers = first.answer(&second, turn).await;
            assert_eq!(answers, [model.lone_tokens(&prompt, &seeded(1), 12)]);
            assert_eq!(first.num(FetchOutcome::NothingNew), 1);
            at_rest(&first.engine).await;

            let mut prompt = prompt;
            prompt.extend(&answers[0]);
            prompt.extend([4, 2, 4]);
            let turn = submission(prompt.clone(), 8, seeded(2));
            let expected = [model.lone_tokens(&prompt, &seeded(2), 8)];
            assert_eq!(second.answer(&first, turn.clone()).await, expected);
            // 33 tokens and 12 more, of which the last has no row: 11 blocks of 4.
            assert_eq!(second.num_blocks(), 11);
            assert_eq!(second.num(FetchOutcome::Begun), 1);
            let stats = second.engine.stats().scheduler;
            assert_eq!(stats.num_prefix_hit_tokens, 44);
            assert_eq!(stats.num_scheduled_tokens, 48 - 44 + 8 - 1);

            // Now the node has the blocks.
            assert_eq!(second.answer(&first, turn).await, expected);
            assert_eq!(second.num(FetchOutcome::NothingNew), 1);
            assert_eq!(second.num_blocks(), 11);
            first.at_rest().await;
            second.at_rest().await;
        }
    }
}

/// The node has computed no prompt yet, so it cannot estimate the time to compute the blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_prompt_behind_it_waits_as_long_as_blocks_come() {
    let fetches = FetchConfig {
        wait: Duration::ZERO,
        ..FETCHES
    };
    // The blocks take about half a second.
    let (way, slow) = (Way::Tcp, Some(20_000));
    let model = model(256);
    let first = Node::start_with(&model, 7, way, FETCHES, slow);
    let second = Node::start_with(&model, 11, way, fetches, None);
    let prompt: Vec<TokenId> = (0..160).map(|i| i * i % 50).collect();
    let turn = submission(prompt.clone(), 8, seeded(1));
    let expected = [model.lone_tokens(&prompt, &seeded(1), 8)];
    assert_eq!(first.answer(&second, turn.clone()).await, expected);
    at_rest(&first.engine).await;
    assert_eq!(second.answer(&first, turn).await, expected);
    assert_eq!(second.engine.stats().scheduler.num_prefix_hit_tokens, 156);
    first.at_rest().await;
    second.at_rest().await;
}

/// Conversations wander over three nodes, several at a time, and each turn names the node of the last one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wandering_conversations_say_what_they_would_say_on_one_node() {
    for (way, model) in [(Way::Tcp, windowed_model(256)), (Way::Shm, model(256))] {
        let start = |incarnation| Arc::new(Node::start(&model, incarnation, way));
        let nodes = [7, 11, 13].map(start);
        let mut talks = Vec::new();
        for talk in 0..8_u64 {
            let (nodes, model) = (nodes.clone(), model.clone());
            talks.push(tokio::spawn(async move {
                let mut state = talk;
                let mut at = draw(&mut state, 3) as usize;
                // Some conversations share a beginning.
                let mut prompt: Vec<TokenId> = (0..9 + talk as u32 % 4).map(|i| i % 7).collect();
                for turn in 0..6 {
                    let num_new = 1 + draw(&mut state, 14);
                    prompt.extend((0..num_new).map(|_| draw(&mut state, 50) as TokenId));
                    let last = at;
                    at = (at + 1 + draw(&mut state, 2) as usize) % 3;
                    let max_tokens = 1 + draw(&mut state, 9) as u32;
                    let sampling = seeded(talk * 10 + turn);
                    let expected = model.lone_tokens(&prompt, &sampling, max_tokens as usize);
                    let asked = submission(prompt.clone(), max_tokens, sampling);
                    let answers = nodes[at].answer(&nodes[last], asked).await;
                    assert_eq!(answers, [expected], "talk {talk}, turn {turn}");
                    prompt.extend(&answers[0]);
                }
            }));
        }
        for talk in talks {
            talk.await.expect("a talk goes on to its end");
        }
        let mut num_blocks = 0;
        for node in &nodes {
            node.at_rest().await;
            num_blocks += node.num_blocks();
            assert_eq!(node.num(FetchOutcome::Failed), 0);
        }
        assert!(num_blocks > 100, "only {num_blocks} blocks were loaded");
    }
}

/// A missing node, a restarted node, and a node with another model.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_names_no_source_is_computed() {
    let model = model(256);
    let node = Node::start(&model, 7, Way::Tcp);
    let gone = Node::start(&model, 11, Way::Tcp);
    let params = gone.blocks.params.clone();
    drop(gone);
    let prompt: Vec<TokenId> = (0..30).map(|i| i * i % 50).collect();
    let expected = model.lone_tokens(&prompt, &seeded(1), 6);
    let asked = submission(prompt.clone(), 6, seeded(1));
    assert_eq!(node.answer_from(&params, asked).await, [expected]);
    assert_eq!(node.num(FetchOutcome::Failed), 1);

    // A prompt of less than a block, and several choices.
    let other = Node::start(&model, 13, Way::Tcp);
    let short = submission(vec![1, 2, 3], 6, seeded(1));
    let expected = model.lone_tokens(&[1, 2, 3], &seeded(1), 6);
    assert_eq!(other.answer(&node, short).await, [expected]);
    assert_eq!(other.num(FetchOutcome::Unsuitable), 1);
    let mut asked = submission(prompt.clone(), 6, seeded(1));
    asked.num_choices = 3;
    let expected = (0..3).map(|choice| {
        let sampling = SamplingParams {
            choice,
            ..seeded(1)
        };
        model.lone_tokens(&prompt, &sampling, 6)
    });
    let expected: Vec<_> = expected.collect();
    assert_eq!(other.answer(&node, asked).await, expected);
    assert_eq!(other.num(FetchOutcome::Begun), 1);
    assert_eq!(other.num_blocks(), 7);
    node.at_rest().await;
    other.at_rest().await;
}
