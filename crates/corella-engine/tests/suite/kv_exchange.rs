//! One engine's exchange of KV with other nodes.

use std::time::Duration;

use corella_core::{FinishReason, KvFact, LostKv};
use corella_engine::{Receipt, StreamEvent};
use corella_test::wait_until;

use crate::fixture::*;

fn accepted(receipt: &mut Receipt) -> usize {
    let first = receipt.stream.next_blocking();
    assert_eq!(first, Some(StreamEvent::Accepted));
    let reservation = receipt.reservation().expect("it was accepted");
    reservation.tables[0].pages.len()
}

#[test]
fn commands_are_answered_while_a_step_runs() {
    let limits = limits(60, 1);
    let mock = model(&limits);
    let gate = mock.gate.clone();
    gate.close();
    gate.let_through(1);
    let engine = start(limits, mock);
    let mut running = submit_one(&engine, submission(vec![1, 2, 3], 4));
    // The first token has come, so the next step, which is held, is under way.
    assert_eq!(running.next_blocking(), Some(StreamEvent::Accepted));
    assert!(matches!(
        running.next_blocking(),
        Some(StreamEvent::Output(_))
    ));

    let mut receipt = engine.reserve(submission(vec![4; 9], 4), LONG).unwrap();
    assert_eq!(accepted(&mut receipt), 3);
    let mut waiting = submit_one(&engine, submission(vec![5; 3], 2));
    assert_eq!(waiting.next_blocking(), Some(StreamEvent::Accepted));
    let large = engine.reserve(submission(vec![6; 100], 4), LONG).unwrap();
    let mut larger = engine.reserve(submission(vec![7; 120], 8), LONG).unwrap();
    let mut large = large;
    assert_eq!(accepted(&mut large), 25);
    assert!(matches!(
        larger.stream.next_blocking(),
        Some(StreamEvent::Refused(_))
    ));
    assert_eq!(engine.stats().num_steps, 1, "all of that during one step");

    let exchange = engine.kv_exchange();
    for receipt in [receipt, large] {
        let id = receipt.stream.id();
        drop(receipt);
        exchange.handle_kv_lost(id, LostKv::Recompute);
    }
    drop((running, waiting));
    gate.open();
    assert_at_rest(&engine);
}

#[test]
fn a_node_that_only_waits_for_kv_is_idle_and_not_lost() {
    let limits = limits(64, 1);
    let mock = model(&limits);
    let expected = mock.lone_tokens(&[4; 9], &submission(vec![], 1).sampling, 3);
    let engine = start(limits, mock);
    let exchange = engine.kv_exchange();

    let timeout = Duration::from_millis(50);
    let mut late = engine.reserve(submission(vec![4; 9], 3), timeout).unwrap();
    accepted(&mut late);
    let (tokens, reason) = read_outputs(&mut late.stream);
    assert!(tokens.is_empty());
    assert_failed(&reason, "its KV cache has not arrived");
    assert_eq!(engine.stats().scheduler.num_held_pages, 3);
    exchange.handle_kv_lost(late.stream.id(), LostKv::Recompute);
    wait_until("no page is held", || {
        engine.stats().scheduler.num_held_pages == 0
    });

    let mut lost = engine.reserve(submission(vec![4; 9], 3), LONG).unwrap();
    accepted(&mut lost);
    exchange.handle_kv_lost(lost.stream.id(), LostKv::Recompute);
    let (tokens, reason) = read_outputs(&mut lost.stream);
    assert_eq!((tokens, reason), (expected, FinishReason::Length));

    let mut ended = engine.reserve(submission(vec![4; 9], 3), LONG).unwrap();
    accepted(&mut ended);
    let how = LostKv::End("its node has gone".into());
    exchange.handle_kv_lost(ended.stream.id(), how);
    let (_, reason) = read_outputs(&mut ended.stream);
    assert_failed(&reason, "its node has gone");
    assert_at_rest(&engine);
}

#[test]
fn what_is_exported_is_held_until_it_is_released() {
    let limits = limits(64, 1);
    let mock = model(&limits);
    let engine = start(limits, mock);
    let exports = |num_tokens| {
        let mut submission = submission(vec![3; num_tokens], 1);
        submission.exports_kv = true;
        submission
    };

    // Without a subscriber, no node could read the rows, so they are not held.
    let mut stream = submit_one(&engine, exports(40));
    finish(&mut stream);
    assert_at_rest(&engine);

    engine.reset_prefix_cache().unwrap();
    let (exchange, facts) = (engine.kv_exchange(), engine.subscribe_kv_facts());
    let mut stream = submit_one(&engine, exports(40));
    let id = stream.id();
    finish(&mut stream);
    // A step computes 32 tokens of prompts.
    let mut next_rows = 0;
    let num_rows = loop {
        match facts.next_blocking() {
            Some(KvFact::Exported {
                request,
                first_row,
                end_row,
                tables,
                ..
            }) => {
                assert_eq!((request, first_row), (id, next_rows));
                let num_pages = end_row.div_ceil(4) - first_row / 4;
                assert_eq!(tables[0].pages.len(), num_pages as usize);
                next_rows = end_row;
            }
            Some(KvFact::ExportEnded { num_rows, .. }) => break num_rows,
            fact => panic!("{fact:?}"),
        }
    };
    assert_eq!((next_rows, num_rows), (40, 40));
    assert_eq!(engine.stats().scheduler.num_held_pages, 10);
    exchange.release_hold(id);
    wait_until("no page is held", || {
        engine.stats().scheduler.num_held_pages == 0
    });
    assert_at_rest(&engine);
}
