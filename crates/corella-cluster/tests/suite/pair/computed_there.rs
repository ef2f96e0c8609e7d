//! The decode node has the conversation, and computes its next turn itself.

use std::future::poll_fn;
use std::sync::Arc;

use corella_cluster::session::{KvAddress, NodeSite};
use corella_core::{ComputePlace, FinishReason, SamplingParams, TokenId};
use corella_engine::{Engine, StreamEvent};
use corella_model::{CostModel, MockConfig, MockExecutor};
use corella_test::wait_until_async;

use crate::pair::blocks::{Blocks, Way};
use crate::pair::constraint::EvenTokens;
use crate::pair::fixture::*;

/// A model whose steps take long enough to be timed.
fn timed_model() -> MockConfig {
    MockConfig {
        cost: Some(CostModel::per_step(200.0)),
        ..model(256)
    }
}

fn seeded(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed,
        ..SamplingParams::GREEDY
    }
}

/// Serves a conversation of one turn: 30 tokens, and an answer of 9.
async fn first_turn(prefill: &Prefill, decode: &Decode, model: &MockConfig) -> Vec<TokenId> {
    let prompt: Vec<TokenId> = (0..30).collect();
    let expected = model.lone_tokens(&prompt, &seeded(1), 9);
    let asked = submission(prompt.clone(), 9, seeded(1));
    let answer = finish(prefill.submit(asked).remove(0)).await;
    assert_eq!(answer, (expected, FinishReason::Length));
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    // No node was known to have a row of the prompt.
    assert_eq!(prefill.node.num_decisions(ComputePlace::Here), 0);
    [prompt, answer.0].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_turn_is_computed_where_the_last_one_was_decoded() {
    let model = timed_model();
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start_asking(&model, &[&decode]);
    let mut prompt = first_turn(&prefill, &decode, &model).await;
    prompt.extend([4, 2, 4]);
    let sent = prefill.node.stats().num_bytes_sent;
    let computed = prefill.engine.stats().scheduler.num_scheduled_tokens;
    let before = decode.engine.stats().scheduler;

    let expected = model.lone_tokens(&prompt, &seeded(2), 8);
    let asked = submission(prompt.clone(), 8, seeded(2));
    let answer = finish(prefill.submit(asked).remove(0)).await;
    assert_eq!(answer, (expected, FinishReason::Length));
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;

    assert_eq!(prefill.node.num_decisions(ComputePlace::There), 1);
    assert_eq!(prefill.node.stats().num_bytes_sent, sent);
    let stats = prefill.engine.stats().scheduler;
    assert_eq!(stats.num_scheduled_tokens, computed);
    // All 38 rows of the first turn are found: 9 whole pages of 4, and 2 copied rows. The last of the 8 tokens of the
    // answer has no row.
    let after = decode.engine.stats().scheduler;
    let num_computed = after.num_scheduled_tokens - before.num_scheduled_tokens;
    assert_eq!(num_computed, 42 - 38 + 7);
}

/// The decode node has more of the prompt cached, and too many requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_prompt_that_stays_lacks_is_fetched() {
    let model = timed_model();
    let (engine, pages) = start_engine(Box::new(MockExecutor::new(model.clone())));
    let there = Blocks::start(&engine, 11, Way::Tcp);
    let site = NodeSite {
        kv_address: KvAddress {
            address: there.address.to_string(),
            ..KvAddress::default()
        },
        host: None,
    };
    let decode = Decode::start_at((engine, pages), 11, "any", site).await;
    let started = start_engine(Box::new(MockExecutor::new(model.clone())));
    let here = Blocks::start(&started.0, PREFILL_INCARNATION, Way::Tcp);
    let options = PrefillOptions {
        fetcher: Some(here.fetcher.clone()),
        ..PrefillOptions::default()
    };
    let prefill = Prefill::start_on(started, options);
    prefill.list(&[&decode]);
    prefill.meet_all().await;
    let mut prompt = first_turn(&prefill, &decode, &model).await;
    prompt.extend([4, 2, 4]);
    let computed = prefill.engine.stats().scheduler.num_scheduled_tokens;
    prefill.node.with_peers(|peers, now_us| {
        let mut known = peers.decode_nodes(now_us).remove(0);
        let report = known.report.as_mut().expect("it has reported");
        report.num_waiting = 9;
        peers.handle_report(known.peer_id, *report, now_us);
    });

    let expected = model.lone_tokens(&prompt, &seeded(2), 8);
    let asked = submission(prompt.clone(), 8, seeded(2));
    let answer = finish(prefill.submit(asked).remove(0)).await;
    assert_eq!(answer, (expected, FinishReason::Length));
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    here.at_rest().await;
    there.at_rest().await;

    // This node has seven of the decode node's nine blocks.
    assert_eq!(here.num_blocks(), 2);
    let stats = prefill.engine.stats().scheduler;
    assert_eq!(stats.num_scheduled_tokens - computed, 42 - 36);
}

/// By costs, the decode node would compute the next turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fixed_node_computes_every_next_turn_whatever_it_costs() {
    for place in [ComputePlace::Here, ComputePlace::There] {
        let model = timed_model();
        let decode = Decode::start(&model, 11).await;
        let executor = Box::new(MockExecutor::new(model.clone()));
        let prefill = Prefill::start_placing(executor, &[&decode], Some(place));
        let mut prompt = first_turn(&prefill, &decode, &model).await;
        let num_computed = |engine: &Engine| engine.stats().scheduler.num_scheduled_tokens;
        let num_sent = || prefill.node.stats().num_bytes_sent;
        let (here, there) = (num_computed(&prefill.engine), num_computed(&decode.engine));
        let sent = num_sent();
        prompt.extend([4, 2, 4]);
        let expected = model.lone_tokens(&prompt, &seeded(1), 9);
        let asked = submission(prompt, 9, seeded(1));
        let answer = finish(prefill.submit(asked).remove(0)).await;
        assert_eq!(answer, (expected, FinishReason::Length));
        at_rest(&prefill.engine).await;
        at_rest(&decode.engine).await;
        // The decode node draws all tokens but the first. It computes 8 rows for them.
        let is_here = place == ComputePlace::Here;
        assert_eq!(num_computed(&prefill.engine) > here, is_here);
        assert_eq!(num_computed(&decode.engine) - there == 8, is_here);
        assert_eq!(num_sent() > sent, is_here);
    }
}

/// The decode node also draws the first token as the constraint demands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_computed_there_follows_its_constraint() {
    let model = timed_model();
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start_asking(&model, &[&decode]);
    let mut prompt = first_turn(&prefill, &decode, &model).await;
    prompt.extend([4, 2, 4]);
    for num_even in [1, 6] {
        let mut asked = submission(prompt.clone(), 12, seeded(3));
        asked.constraint = Some(Arc::new(EvenTokens { num_even }));
        let answer = finish(prefill.submit(asked).remove(0)).await;
        let expected = model.lone_masked_tokens(&prompt, &seeded(3), |output| {
            (output.len() < num_even as usize).then(|| [0x5555_5555; 2].into())
        });
        assert_eq!(answer, (expected, FinishReason::EndToken));
    }
    assert!(prefill.node.num_decisions(ComputePlace::There) > 0);
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_after_it_was_told_to_compute_leaves_no_gap() {
    // The decode node is killed before its first token, and after some tokens.
    for num_read in [0, 10] {
        let model = timed_model();
        let mut slow = model.clone();
        slow.cost = Some(CostModel::per_step(5000.0));
        let decode = Decode::start(&slow, 11).await;
        let prefill = Prefill::start_asking(&model, &[&decode]);
        let mut prompt = first_turn(&prefill, &decode, &model).await;
        prompt.extend([4, 2, 4]);
        let expected = model.lone_tokens(&prompt, &seeded(2), 60);
        let asked = submission(prompt.clone(), 60, seeded(2));
        let mut stream = prefill.submit(asked).remove(0);
        wait_until_async("it is left to the decode node", || {
            prefill.node.num_decisions(ComputePlace::There) == 1
        })
        .await;
        let mut tokens = Vec::new();
        let mut reason = None;
        let mut is_killed = false;
        while reason.is_none() {
            if tokens.len() >= num_read && !is_killed {
                is_killed = true;
                decode.engine.shutdown();
                decode.kill();
            }
            match poll_fn(|cx| stream.poll_next(cx)).await {
                Some(StreamEvent::Output(output)) => {
                    tokens.extend(output.sample.map(|sample| sample.token));
                    reason = output.finish;
                }
                Some(StreamEvent::Accepted) => {}
                event => panic!("{event:?}"),
            }
        }
        assert_eq!((tokens, reason), (expected, Some(FinishReason::Length)));
        assert_eq!(prefill.node.fallbacks().values().sum::<u64>(), 1);
        at_rest(&prefill.engine).await;
    }
}
