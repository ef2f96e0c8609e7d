//! Preempted requests whose KV goes to host memory and comes back.

use corella_core::{FinishReason, HeadRoom, KvFact, SamplingParams, SchedulerConfig, TokenId};
use corella_engine::{Engine, Receipt, StreamEvent};
use corella_model::{MockConfig, PageForm, StepGate};
use corella_test::wait_until;

use crate::fixture::{
    LONG, assert_at_rest, assert_failed, finish, limits, model, start, submission, submit_one,
};
use crate::load::{Dice, requests_come_and_go};

fn spilling(num_pages: u32, max_inflight_steps: u32, max_spilled_pages: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_spilled_pages,
        ..limits(num_pages, max_inflight_steps)
    }
}

fn outputs_equal_lone_runs(max_inflight_steps: u32, max_spilled_pages: u32) {
    let limits = spilling(40, max_inflight_steps, max_spilled_pages);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let dice = Dice(u64::from(max_inflight_steps));
    let stats = requests_come_and_go(&engine, &mock, dice).scheduler;
    assert!(stats.num_spills > 0, "{stats:?}");
    assert!(stats.num_restores > 0, "{stats:?}");
    assert_eq!(stats.num_handed_back, 0);
    wait_until("host memory is given back", || {
        engine.stats().scheduler.num_spilled_pages == 0
    });
}

#[test]
fn outputs_of_spilled_requests_equal_lone_runs() {
    outputs_equal_lone_runs(1, 80);
    outputs_equal_lone_runs(2, 80);
}

/// Some requests get host memory, and the others are computed again.
#[test]
fn a_small_host_memory_is_enough() {
    outputs_equal_lone_runs(1, 12);
}

/// Stored KV comes back unchanged, so no row is computed twice.
#[test]
fn nothing_is_computed_twice() {
    let mut limits = spilling(40, 1, 200);
    limits.enable_prefix_caching = false;
    limits.head_room = HeadRoom::fixed_share(0);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let mut num_rows = 0;
    let mut streams = Vec::new();
    for at in 0..8 {
        let submission = submission(vec![at; 9], 40);
        // The last token drawn needs no row.
        num_rows += 9 + 40 - 1;
        let expected = mock.lone_tokens(&submission.prompt, &submission.sampling, 40);
        streams.push((submit_one(&engine, submission), expected));
    }
    for (mut stream, expected) in streams {
        assert_eq!(finish(&mut stream), (expected, FinishReason::Length));
    }
    assert_at_rest(&engine);
    let stats = engine.stats().scheduler;
    assert!(stats.num_preemptions > 0, "{stats:?}");
    assert_eq!(stats.num_restores, stats.num_preemptions);
    assert_eq!(stats.num_scheduled_tokens, num_rows);
}

/// Reserves pages for a prompt, and fills them with KV of another engine.
fn receive(engine: &Engine, source: &Engine, prompt: Vec<u32>, max_tokens: u32) -> Receipt {
    let mut computed = submission(prompt.clone(), 1);
    computed.exports_kv = true;
    let facts = source.subscribe_kv_facts();
    let mut stream = submit_one(source, computed);
    let id = stream.id();
    let (first, _) = finish(&mut stream);
    let mut pages = Vec::new();
    while let Some(fact) = facts.next_blocking() {
        match fact {
            KvFact::Exported { tables, .. } => pages.extend(&tables[0].pages),
            KvFact::ExportEnded { .. } => break,
            fact => panic!("{fact:?}"),
        }
    }
    let receipt = engine.reserve(submission(prompt, max_tokens), LONG);
    let mut receipt = receipt.expect("the reservation was refused");
    assert_eq!(receipt.stream.next_blocking(), Some(StreamEvent::Accepted));
    let reservation = receipt.reservation().expect("accepted");
    let reserved = reservation.tables[0].pages.clone();
    let (from, to) = (source.kv_pages(), engine.kv_pages());
    let layer_bytes = from.geometry().layer_bytes();
    let mut bytes = vec![0; reserved.len() * layer_bytes];
    for layer in 0..from.geometry().num_layers {
        // SAFETY: the source pages are held for this reader until `release_hold`, and the target
        // pages are reserved until `handle_kv_arrived`.
        unsafe {
            from.read(layer, &pages, PageForm::Native, &mut bytes);
            to.write(layer, &reserved, PageForm::Native, &bytes);
        }
    }
    source.kv_exchange().release_hold(id);
    engine
        .kv_exchange()
        .handle_kv_arrived(receipt.stream.id(), first[0]);
    receipt
}

fn received(max_spilled_pages: u32) -> (Engine, MockConfig, Vec<Receipt>) {
    let mut limits = spilling(32, 1, max_spilled_pages);
    limits.enable_prefix_caching = false;
    limits.head_room = HeadRoom::fixed_share(0);
    let mut mock = model(&limits);
    let source = start(limits.clone(), mock.clone());
    // All arrive before the first has ended.
    mock.gate = StepGate::default();
    mock.gate.close();
    let engine = start(limits, mock.clone());
    let receipts = (0..4).map(|at| receive(&engine, &source, vec![at; 8], 60));
    let receipts = receipts.collect();
    mock.gate.open();
    (engine, mock, receipts)
}

/// Reads to the end. The first token is not emitted, and is put before the others.
fn read_received(mut receipt: Receipt, first: TokenId) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = vec![first];
    while let Some(StreamEvent::Output(output)) = receipt.stream.next_blocking() {
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(reason) = output.finish {
            return (tokens, reason);
        }
    }
    panic!("the stream ended without a terminal event");
}

/// A decode node gives the same tokens, and computes no prompt.
#[test]
fn received_requests_are_never_computed_again() {
    let (engine, mock, receipts) = received(64);
    for (at, receipt) in receipts.into_iter().enumerate() {
        let expected = mock.lone_tokens(&[at as u32; 8], &SamplingParams::GREEDY, 60);
        let found = read_received(receipt, expected[0]);
        assert_eq!(found, (expected, FinishReason::Length));
    }
    assert_at_rest(&engine);
    let stats = engine.stats().scheduler;
    assert!(stats.num_restores > 0, "{stats:?}");
    assert_eq!(stats.num_scheduled_tokens, 4 * 59);
}

/// Without host memory, requests that do not fit return to their prefill node.
#[test]
fn received_requests_that_cannot_be_kept_end() {
    let (engine, mock, receipts) = received(0);
    let mut num_back = 0;
    for (at, receipt) in receipts.into_iter().enumerate() {
        let expected = mock.lone_tokens(&[at as u32; 8], &SamplingParams::GREEDY, 60);
        let (tokens, reason) = read_received(receipt, expected[0]);
        assert_eq!(tokens, expected[..tokens.len()]);
        if reason != FinishReason::Length {
            assert_failed(&reason, "its KV cache could not be kept");
            num_back += 1;
        }
    }
    assert_at_rest(&engine);
    let stats = engine.stats().scheduler;
    assert!(num_back > 0, "{stats:?}");
    assert_eq!(stats.num_handed_back, num_back);
    assert_eq!(stats.num_restores, 0);
}
