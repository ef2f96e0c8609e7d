//! Snapshots of the engine for a watcher.

use corella_core::{PageState, RequestStatus};
use corella_engine::{Engine, EngineSnapshot, EngineWatch};
use corella_test::wait_until;

use crate::fixture::{
    assert_at_rest, block_on, finish, limits, model, read_outputs, start, submission, submit_one,
};

fn snapshot(watch: &mut EngineWatch) -> Option<EngineSnapshot> {
    block_on(watch.snapshot())
}

fn engine() -> Engine {
    let limits = limits(64, 1);
    let mock = model(&limits);
    start(limits, mock)
}

#[test]
fn steps_are_told_once_with_their_tokens() {
    let engine = engine();
    let mut watch = engine.watch();
    let first = snapshot(&mut watch).expect("the engine works");
    assert!(first.steps.is_empty() && first.requests.is_empty());
    assert_eq!(first.page_map.cells, [PageState::Free; 64]);

    // 40 tokens of prompt are computed in chunks of at most 32; the first of 5 tokens is drawn with
    // the last chunk, so that four decodes follow.
    let (tokens, _) = finish(&mut submit_one(&engine, submission((0..40).collect(), 5)));
    assert_eq!(tokens.len(), 5);
    assert_at_rest(&engine);
    let second = snapshot(&mut watch).expect("the engine works");
    let computed: Vec<_> = second
        .steps
        .iter()
        .map(|step| (step.num_prefill_tokens, step.num_decode_tokens))
        .collect();
    assert_eq!(computed, [(32, 0), (8, 0), (0, 1), (0, 1), (0, 1), (0, 1)]);
    assert!(second.steps.iter().all(|step| step.max_requests == 1));
    assert!(second.steps.is_sorted_by_key(|step| step.ended));
    assert!(second.steps[0].ended >= first.time && second.steps[5].ended <= second.time);
    // The 44 tokens that were computed fill 11 pages of 4.
    let num_cached = second
        .page_map
        .cells
        .iter()
        .filter(|&&cell| cell == PageState::Cached)
        .count();
    assert_eq!(num_cached, 11);
    assert_eq!(second.stats.scheduler.num_cached_pages, 11);

    let third = snapshot(&mut watch).expect("the engine works");
    assert!(third.steps.is_empty());
    assert!(third.time > second.time);
}

#[test]
fn requests_are_seen_while_they_run() {
    let limits = limits(64, 1);
    let mock = model(&limits);
    let gate = mock.gate.clone();
    gate.close();
    gate.let_through(4);
    let engine = start(limits, mock);
    let mut watch = engine.watch();
    let mut stream = submit_one(&engine, submission((0..10).collect(), 100));
    assert!(stream.next_blocking().is_some());
    wait_until("four tokens are drawn", || {
        engine.stats().scheduler.num_generated_tokens == 4
    });
    let seen = snapshot(&mut watch).expect("the engine works");
    let [request] = seen.requests[..] else {
        panic!("{:?}", seen.requests);
    };
    assert_eq!(request.id, stream.id());
    assert_eq!(request.status, RequestStatus::Decode);
    assert_eq!(request.num_prompt_tokens, 10);
    assert_eq!(request.max_tokens, 100);
    assert_eq!(request.num_output_tokens, 4);
    assert_eq!(seen.stats.scheduler.num_running, 1);
    drop(stream);
    gate.open();
    assert_at_rest(&engine);
    assert!(snapshot(&mut watch).expect("it works").requests.is_empty());
}

#[test]
fn watch_ends_with_the_next_one_and_with_the_engine() {
    let engine = engine();
    let mut earlier = engine.watch();
    assert!(snapshot(&mut earlier).is_some());
    let mut later = engine.watch();
    assert!(snapshot(&mut later).is_some());
    assert_eq!(snapshot(&mut earlier), None);
    engine.shutdown();
    assert_eq!(snapshot(&mut later), None);
    assert_eq!(snapshot(&mut engine.watch()), None);
}

/// Steps before a watch are not reported to it.
#[test]
fn watch_begins_with_the_steps_after_it() {
    let engine = engine();
    finish(&mut submit_one(&engine, submission((0..10).collect(), 3)));
    drop(engine.watch());
    finish(&mut submit_one(&engine, submission((0..10).collect(), 3)));
    assert_at_rest(&engine);
    let mut watch = engine.watch();
    assert!(snapshot(&mut watch).expect("it works").steps.is_empty());
    let mut stream = submit_one(&engine, submission((20..30).collect(), 3));
    assert!(stream.next_blocking().is_some());
    read_outputs(&mut stream);
    assert_at_rest(&engine);
    assert_eq!(snapshot(&mut watch).expect("it works").steps.len(), 3);
}
