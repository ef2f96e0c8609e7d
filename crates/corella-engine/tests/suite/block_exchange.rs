//! Blocks that an engine holds for other nodes, and blocks that it fetches.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchMedium, FetchRefusal, FinishReason, HeldBlocks,
    HoldRefusal, KvGroup, Namespace, PageId, SamplingParams, SchedulerConfig, TokenId,
};
use corella_engine::{BlockExchange, BlockFact, Engine, StreamEvent};
use corella_model::PageForm;
use corella_test::wait_until;

use crate::fixture::{
    LONG, assert_at_rest, block_on, finish, limits, model, start, submission, submit_one,
};

/// A short time whose end a test waits for.
const SHORT: Duration = Duration::from_millis(20);

/// Pages have 4 tokens.
fn sharing(max_pages: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_served_pages: max_pages,
        max_fetched_pages: max_pages,
        ..limits(64, 1)
    }
}

fn prompt() -> Vec<TokenId> {
    (1..22).collect()
}

/// An engine that has computed the 5 blocks of the prompt.
fn source(limits: SchedulerConfig) -> Engine {
    let mock = model(&limits);
    let engine = start(limits, mock);
    finish(&mut submit_one(&engine, submission(prompt(), 1)));
    assert_at_rest(&engine);
    engine
}

fn list(exchange: &BlockExchange, tokens: &[TokenId]) -> BlockList {
    let namespace = Namespace::default();
    exchange.list(&namespace, tokens, &exchange.hashes(&namespace, tokens))
}

fn look_up(exchange: &BlockExchange, tokens: &[TokenId]) -> Option<u32> {
    block_on(exchange.look_up(list(exchange, tokens)))
}

fn hold(exchange: &BlockExchange, lease: Duration) -> Option<Result<HeldBlocks, HoldRefusal>> {
    block_on(exchange.hold(list(exchange, &prompt()), 0, lease))
}

fn begin_fetch(
    exchange: &BlockExchange,
    soft: Duration,
    hard: Duration,
) -> Option<Result<FetchGrant, FetchRefusal>> {
    block_on(exchange.begin_fetch(
        FetchMedium::Peer,
        Namespace::default(),
        prompt(),
        soft,
        hard,
    ))
}

/// Copies pages of one engine to another.
fn copy_pages(from: &Engine, held: &[PageId], to: &Engine, reserved: &[PageId]) {
    let (from, to) = (from.kv_pages(), to.kv_pages());
    let mut bytes = vec![0; held.len() * from.geometry().layer_bytes()];
    for layer in 0..from.geometry().num_layers {
        // SAFETY: the pages of a hold are locked until it is released, and those of a fetch are reserved until it has
        // ended.
        unsafe {
            from.read(layer, held, PageForm::Native, &mut bytes);
            to.write(layer, reserved, PageForm::Native, &bytes);
        }
    }
}

#[test]
fn blocks_of_a_request_that_has_ended_are_held_until_they_are_released() {
    let engine = source(sharing(64));
    let exchange = engine.block_exchange();
    let _facts = engine.subscribe_block_facts();
    assert_eq!(exchange.page_size(), 4);
    let list = list(&exchange, &prompt());
    assert_eq!((list.tokens.len(), list.hashes.len()), (20, 5));
    assert_eq!(look_up(&exchange, &prompt()), Some(5));
    let mut other = prompt();
    other[9] = 40;
    assert_eq!(look_up(&exchange, &other), Some(2));
    other[0] = 40;
    assert_eq!(look_up(&exchange, &other), Some(0));

    let held = hold(&exchange, LONG).unwrap().unwrap();
    assert_eq!((held.num_blocks, held.tables[0].pages.len()), (5, 5));
    wait_until("pages are served", || {
        engine.stats().scheduler.num_served_pages == 5
    });
    assert_eq!(block_on(exchange.release(held.id)), Some(true));
    assert_eq!(block_on(exchange.release(held.id)), Some(false));
    assert_at_rest(&engine);
    engine.reset_prefix_cache().unwrap();
    assert_eq!(hold(&exchange, LONG), Some(Err(HoldRefusal::NothingHere)));
}

/// No other event wakes the engine.
#[test]
fn an_idle_engine_ends_holds_and_fetches_in_time() {
    let engine = source(sharing(64));
    let exchange = engine.block_exchange();
    let facts = engine.subscribe_block_facts();
    let held = hold(&exchange, SHORT).unwrap().unwrap();
    assert_eq!(facts.next_blocking(), Some(BlockFact::HoldEnded(held.id)));
    wait_until("the pages are still locked", || {
        engine.stats().scheduler.num_served_pages == 5
    });
    assert_eq!(block_on(exchange.release(held.id)), Some(false));

    engine.reset_prefix_cache().unwrap();
    let fetch = begin_fetch(&exchange, Duration::ZERO, SHORT)
        .unwrap()
        .unwrap();
    assert_eq!(
        facts.next_blocking(),
        Some(BlockFact::FetchCancelled(fetch.id))
    );
    assert_eq!(facts.try_next(), None);
    wait_until("the pages are still reserved", || {
        engine.stats().scheduler.num_fetching_pages == 5
    });
    exchange.handle_fetched(fetch.id, 5);
    exchange.handle_fetch_ended(fetch.id, FetchEnd::Lost);
    assert_at_rest(&engine);
    assert_eq!(look_up(&exchange, &prompt()), Some(0));
}

/// The rows come from another engine, and the mock executor checks them.
fn fetched_blocks_are_a_prefix(groups: Vec<KvGroup>) {
    let mut limits = sharing(64);
    limits.kv_groups = groups;
    let source = source(limits.clone());
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let held = hold(&source.block_exchange(), LONG).unwrap().unwrap();
    let exchange = engine.block_exchange();
    let fetch = begin_fetch(&exchange, LONG, LONG).unwrap().unwrap();
    assert_eq!(
        begin_fetch(&exchange, LONG, LONG),
        Some(Err(FetchRefusal::UnderWay(fetch.id)))
    );
    assert_eq!(fetch.num_found, 0);

    let mut stream = submit_one(&engine, submission(prompt(), 6));
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    for (held, reserved) in held.tables.iter().zip(&fetch.tables) {
        assert_eq!(held.num_gone, reserved.num_gone);
        copy_pages(&source, &held.pages, &engine, &reserved.pages);
    }
    // The engine plans a step between two answers. It does not begin the request, because no block has come yet.
    for _ in 0..2 {
        assert_eq!(look_up(&exchange, &prompt()), Some(0));
    }
    exchange.handle_fetched(fetch.id, 2);
    exchange.handle_fetch_ended(fetch.id, FetchEnd::Done);
    let Some(StreamEvent::Output(first)) = stream.next_blocking() else {
        panic!("the stream has no output");
    };
    assert_eq!(first.cache_use.num_cached_tokens, 20);
    let mut tokens = vec![first.sample.unwrap().token];
    while let Some(StreamEvent::Output(output)) = stream.next_blocking() {
        tokens.extend(output.sample.map(|sample| sample.token));
    }
    assert_eq!(
        tokens,
        mock.lone_tokens(&prompt(), &SamplingParams::GREEDY, 6)
    );
    assert_at_rest(&engine);
    let stats = engine.stats().scheduler;
    assert_eq!((stats.num_fetched_blocks, stats.num_fetching_pages), (5, 0));
    assert_eq!(stats.num_scheduled_tokens, 1 + 5, "one token of the prompt");
    assert_eq!(look_up(&exchange, &prompt()), Some(5));
}

#[test]
fn a_request_waits_for_a_fetch_and_goes_on_behind_its_blocks() {
    fetched_blocks_are_a_prefix(vec![KvGroup::default()]);
    let window = KvGroup { window: Some(8) };
    fetched_blocks_are_a_prefix(vec![KvGroup::default(), window]);
}

/// The request is the engine's only event, and no block of the fetch arrives.
#[test]
fn a_request_goes_on_without_its_fetch_at_the_soft_deadline() {
    let limits = sharing(64);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let exchange = engine.block_exchange();
    let _facts = engine.subscribe_block_facts();
    let fetch = begin_fetch(&exchange, SHORT, LONG).unwrap().unwrap();
    let found = finish(&mut submit_one(&engine, submission(prompt(), 3)));
    let expected = mock.lone_tokens(&prompt(), &SamplingParams::GREEDY, 3);
    assert_eq!(found, (expected, FinishReason::Length));
    assert_eq!(engine.stats().scheduler.num_fetching_pages, 5);
    exchange.handle_fetch_ended(fetch.id, FetchEnd::Done);
    assert_at_rest(&engine);
    assert_eq!(engine.stats().scheduler.num_fetched_blocks, 0);
}

/// Each hold takes all pages that may be served, so the next hold shows whether any page is still held.
#[test]
fn a_hold_does_not_outlive_those_who_know_of_it() {
    let held = |exchange: &BlockExchange, lease| {
        let held = hold(exchange, lease).unwrap();
        held.map(|held| held.num_blocks)
    };

    // The asker gives up, before or after the engine's answer.
    let engine = source(sharing(5));
    let exchange = engine.block_exchange();
    for _ in 0..200 {
        let list = list(&exchange, &prompt());
        let mut asked = Box::pin(exchange.hold(list, 0, LONG));
        let polled = asked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // A fast engine has answered at once, and the asker owns the hold.
        if let Poll::Ready(Some(Ok(held))) = polled {
            block_on(exchange.release(held.id));
        }
    }
    // No subscriber is told of the hold's end.
    assert_eq!(held(&exchange, SHORT), Ok(5));
    wait_until("the hold has ended", || held(&exchange, LONG).is_ok());

    // The subscriber that was told of the hold's end has gone, or is replaced.
    for is_replaced in [false, true] {
        let engine = source(sharing(5));
        let exchange = engine.block_exchange();
        let facts = engine.subscribe_block_facts();
        assert_eq!(held(&exchange, SHORT), Ok(5));
        assert!(facts.next_blocking().is_some());
        let refusal = held(&exchange, LONG);
        assert!(matches!(refusal, Err(HoldRefusal::TooLarge { .. })));
        if is_replaced {
            let _newer = engine.subscribe_block_facts();
            assert_eq!(facts.next_blocking(), None);
            assert_eq!(held(&exchange, LONG), Ok(5));
        } else {
            drop(facts);
            wait_until("the hold is released", || held(&exchange, LONG).is_ok());
        }
    }
}

#[test]
fn a_fetch_does_not_outlive_an_asker_that_gives_up() {
    let limits = sharing(64);
    let mock = model(&limits);
    let engine = start(limits, mock);
    let exchange = engine.block_exchange();
    for _ in 0..200 {
        let mut asked = Box::pin(exchange.begin_fetch(
            FetchMedium::Peer,
            Namespace::default(),
            prompt(),
            LONG,
            LONG,
        ));
        let polled = asked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // A fast engine has answered at once, and the asker owns the fetch.
        if let Poll::Ready(Some(Ok(fetch))) = polled {
            exchange.handle_fetch_ended(fetch.id, FetchEnd::Lost);
        }
    }
    let fetch = begin_fetch(&exchange, LONG, LONG).unwrap().unwrap();
    exchange.handle_fetch_ended(fetch.id, FetchEnd::Lost);
    assert_at_rest(&engine);
}

#[test]
fn a_stopped_engine_answers_nothing() {
    let engine = source(sharing(64));
    let exchange = engine.block_exchange();
    let facts = engine.subscribe_block_facts();
    let held = hold(&exchange, LONG).unwrap().unwrap();
    engine.shutdown();
    assert_eq!(facts.next_blocking(), None);
    assert_eq!(look_up(&exchange, &prompt()), None);
    assert_eq!(hold(&exchange, LONG), None);
    assert_eq!(block_on(exchange.release(held.id)), None);
    assert_eq!(begin_fetch(&exchange, LONG, LONG), None);
}
