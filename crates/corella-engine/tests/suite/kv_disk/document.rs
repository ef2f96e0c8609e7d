//! Questions about one document to a model with recurrent layers: a prompt with another tail continues from a state
//! before the tail.

use super::*;

/// Limits with which snapshots are made after every fourth block, after the prompt, and where prompts diverge, if that
/// is two blocks or more after the last snapshot.
fn document_limits(num_pages: u32) -> SchedulerConfig {
    let mut limits = limits(num_pages, 1);
    limits.set_recurrent_state(RecurrentState {
        num_snapshots: 16,
        snapshot_interval: 4,
        least_distance: 2,
    });
    limits
}

/// A document of ten whole blocks and three tokens, and a question. All of it has twelve whole blocks, and states after
/// 4, 8 and 12 of them.
fn question(first: TokenId) -> Vec<TokenId> {
    let document = (0..43).map(|at| (3 + at * 7) % 50);
    document.chain((0..7).map(|at| first + at)).collect()
}

/// An engine without a cache.
fn lone_engine() -> Engine {
    let limits = SchedulerConfig {
        enable_prefix_caching: false,
        ..document_limits(64)
    };
    start(limits.clone(), model(&limits))
}

/// Asks a question, whose answer has to be that of the lone engine. Returns the number of cached prompt tokens.
fn ask_about(engine: &Engine, first: TokenId, lone: &Engine) -> u32 {
    let [(tokens, num_cached), (expected, _)] =
        [engine, lone].map(|engine| ask(engine, question(first), Namespace::default()));
    assert_eq!(tokens, expected);
    num_cached
}

/// The mock executor checks that a request continues from the state after its own tokens.
#[test]
fn another_question_about_a_document_continues_from_a_state_within_it() {
    let folder = Folder::new("document");
    let lone = lone_engine();
    let first = engine_of(document_limits(64), &folder.0, 1);
    wait_opened(&first);
    assert_eq!(ask_about(&first, 0, &lone), 0);
    assert_eq!(ask_about(&first, 0, &lone), 48);
    wait_stored(&first, 12 + 3);
    stop(first);

    // The disk has the state after the eighth block.
    let second = engine_of(document_limits(64), &folder.0, 1);
    wait_until("the file is scanned", || stats(&second).num_pages == 15);
    assert_eq!(ask_about(&second, 1, &lone), 32);
    assert_eq!(stats(&second).num_read, 8 + 1);
    // Memory has it, too, and the next question shows where questions begin.
    assert_eq!(ask_about(&second, 2, &lone), 32);
    wait_stored(&second, 1);
    assert_eq!(ask_about(&second, 3, &lone), 40);
    assert_eq!(stats(&second).num_read, 8 + 1);
    stop(second);

    let third = engine_of(document_limits(64), &folder.0, 1);
    wait_until("the file is scanned", || stats(&third).num_pages == 16);
    assert_eq!(ask_about(&third, 4, &lone), 40);
    assert_eq!(stats(&third).num_read, 10 + 1);
    stop(third);
    stop(lone);
}

/// The pool has room for one prompt and its answer at a time. A prompt evicts the document but for its first four
/// blocks, so that only the disk has more of it.
#[test]
fn another_question_about_an_evicted_document_continues_from_a_state_within_it() {
    let folder = Folder::new("evicted-document");
    let lone = lone_engine();
    let engine = engine_of(document_limits(18), &folder.0, 1);
    wait_opened(&engine);
    assert_eq!(ask_about(&engine, 0, &lone), 0);
    wait_stored(&engine, 12 + 3);
    let mut numbers = 1..;
    wait_until("another question finds the document on the disk", || {
        let number = numbers.next().unwrap();
        let other = (0..50).map(|at| (number + at * 3) % 50).collect();
        ask(&engine, other, Namespace::default());
        ask_about(&engine, number % 40, &lone) >= 32
    });
    assert!(engine.stats().scheduler.num_evicted_pages > 0);
    assert!(stats(&engine).num_read > 0);
    stop(engine);
    stop(lone);
}

/// Twelve blocks and their states after 4, 8 and 12 of them take 15 slots, and the first eight with two states take ten.
#[test]
fn a_document_that_is_longer_than_the_file_is_kept_up_to_a_state() {
    let folder = Folder::new("long-document");
    let lone = lone_engine();
    let large = engine_of(document_limits(64), &folder.0, 1);
    wait_opened(&large);
    let slot_bytes = (MAX_BYTES - LABEL_BYTES as u64) / u64::from(stats(&large).max_pages);
    stop(large);

    let max_bytes = LABEL_BYTES as u64 + 13 * slot_bytes;
    let disk = disk_config(&[&folder.0], max_bytes);
    let small = engine_on(document_limits(64), disk.clone());
    wait_opened(&small);
    assert_eq!(stats(&small).max_pages, 13);
    ask_about(&small, 0, &lone);
    ask_about(&small, 0, &lone);
    wait_stored(&small, 8 + 2);
    stop(small);
    let small = engine_on(document_limits(64), disk);
    wait_until("the file is scanned", || stats(&small).num_pages == 10);
    assert_eq!(ask_about(&small, 1, &lone), 32);
    stop(small);
    stop(lone);
}
